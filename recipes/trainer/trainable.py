"""Selects the parameters that are trained."""

from typing import Any

from crosshead.common.errors import RecipeError
from crosshead.modeling.mechanisms import MECHANISMS

from ..schema.sections import LoraOptions, TrainOptions

MIXERS = ".mixers."
"""What the name of every parameter of a mechanism holds."""
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def is_new(name: str) -> bool:
    """Whether a parameter belongs to a mechanism."""
    return MIXERS in name


def set_trainable(model: Any, options: TrainOptions) -> Any:
    """Freeze what is not to move; for `mixers+lora`, the model in peft's wrapper."""
    if options.trainable == "all":
        return model
    mixed = bool(getattr(model.config, "mixers", None))
    if not mixed or (options.lora is None and not any(is_new(name) for name, _ in model.named_parameters())):
        lacks = "mechanism with parameters" if mixed else "mechanism"
        raise RecipeError(
            f"train.trainable={options.trainable!r}, but the model has no {lacks}: use all, or convert the model first"
        )
    if options.lora is not None:
        return _with_lora(model, options.lora)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_new(name))
    return model


def _with_lora(model: Any, options: LoraOptions) -> Any:
    from peft import LoraConfig, get_peft_model

    names, parameters = ([name for name, _ in found] for found in (model.named_modules(), model.named_parameters()))
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,  # type: ignore[arg-type]  # it is a factor: peft multiplies by it
        lora_dropout=options.dropout,
        target_modules=[name for name in PROJECTIONS if any(found.endswith(f".{name}") for found in names)],
        modules_to_save=[name for name in MECHANISMS if any(f"{MIXERS}{name}." in found for found in parameters)],
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def is_wrapped(model: Any) -> bool:
    """Whether peft holds the model."""
    return hasattr(model, "merge_and_unload")


def whole_model(model: Any) -> Any:
    """The model itself, with what peft has learnt merged into it."""
    return model.merge_and_unload() if is_wrapped(model) else model
