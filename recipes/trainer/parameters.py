"""Trainable parameters, optimizer groups and learning-rate schedule."""

import warnings
from collections.abc import Collection
from math import cos, pi
from typing import Any

from torch import nn
from torch.optim import Optimizer

from crosshead.common.errors import RecipeError
from crosshead.modeling.mechanisms import MECHANISMS

from ..schema.recipe import Recipe
from ..schema.sections import LoraOptions, TrainOptions

MIXERS = ".mixers."
"""Part of the name of every mechanism parameter."""
ATTENTION = ".self_attn"
"""Suffix of the name of every attention layer."""
LATENT_PROJECTIONS = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]
"""Projections of multi-head latent attention (MLA, DeepSeek)."""
MASK_TOKEN = ".mask_token"
"""Suffix of the name of DINOv2's embedding of masked patches: unused in training, where DDP expects all gradients."""
PROJECTIONS = ["q_proj", "k_proj", "v_proj", *LATENT_PROJECTIONS, "o_proj", "gate_proj", "up_proj", "down_proj"]


def is_mechanism(name: str) -> bool:
    """Whether the parameter with this name belongs to a mechanism."""
    return MIXERS in name


def set_trainable(model: Any, options: TrainOptions) -> Any:
    """Freeze the parameters that are not trained; return the model, for LoRA in peft's wrapper."""
    if options.trainable == "all":
        for name, parameter in model.named_parameters():
            if name.endswith(MASK_TOKEN):
                parameter.requires_grad_(False)
        return model
    has_mechanism = bool(getattr(model.config, "mixers", None))
    has_parameters = any(is_mechanism(name) for name, _ in model.named_parameters())
    if not has_mechanism or (options.lora is None and not has_parameters):
        missing = "mechanism with parameters" if has_mechanism else "mechanism"
        raise RecipeError(
            f"train.trainable={options.trainable!r}, but the model has no {missing}: use all, or convert the model "
            "first"
        )
    if options.lora is not None:
        return _add_lora(model, options.lora)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_mechanism(name))
    return model


def _add_lora(model: Any, options: LoraOptions) -> Any:
    from peft import LoraConfig, get_peft_model

    modules, parameters = ([name for name, _ in named] for named in (model.named_modules(), model.named_parameters()))
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,  # type: ignore[arg-type]  # a float also works
        lora_dropout=options.dropout,
        target_modules=[name for name in PROJECTIONS if any(module.endswith(f".{name}") for module in modules)],
        modules_to_save=[name for name in MECHANISMS if any(f"{MIXERS}{name}." in part for part in parameters)],
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():  # peft reads an attribute that transformers deprecates
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        return get_peft_model(model, config)


def has_lora(model: Any) -> bool:
    """Whether the model is in peft's wrapper, with LoRA adapters."""
    return hasattr(model, "merge_and_unload")


def separate_mechanisms(
    optimizer: Optimizer, model: nn.Module, decaying: Collection[str], options: TrainOptions
) -> None:
    """Move mechanism parameters into their own optimizer groups, after the others, and drop empty groups.

    Their weight decay is separate, as it would pull a map that starts as the identity (the stock model) towards zero.
    `decaying` has the names of all parameters with weight decay, without norms and biases. The schedule multiplies the
    learning rate of each group.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    stock: list[dict[str, Any]] = []
    mechanisms: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        stock.append(group | {"params": [part for part in group["params"] if not is_mechanism(names[part])]})
        mechanism_parts = [part for part in group["params"] if is_mechanism(names[part])]
        for decays in (True, False):
            parts = [part for part in mechanism_parts if (names[part] in decaying) == decays]
            decay = options.mechanisms.weight_decay if decays else 0.0
            mechanisms.append(group | {"params": parts, "lr": options.mechanism_rate, "weight_decay": decay})
    optimizer.param_groups = [group for group in (*stock, *mechanisms) if group["params"]]


def learning_rate_factor(recipe: Recipe, step: int) -> float:
    """Return the learning rate of a step, counted from 0, as a fraction of `train.learning_rate`."""
    train, warmup = recipe.train, recipe.warmup_steps
    if step < warmup:
        start = train.warmup_from / train.learning_rate
        return start + (1 - start) * (step + 1) / warmup
    if train.schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, recipe.steps - 1 - warmup))
    return train.final_ratio + (1 - train.final_ratio) * (1 + cos(pi * done)) / 2


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """Return the attention layers of a model, in order."""
    return [module for name, module in model.named_modules() if name.endswith(ATTENTION)]
