"""Load the model and the teacher of a recipe."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

from crosshead.common.access_tokens import TOKEN, without_tokens
from crosshead.common.errors import RecipeError, one_line
from crosshead.common.model_location import LICENCE_FILES, foreign_link, split_revision

from ..schema.model_config import CLASSIFIERS, check_expert_bias, model_config, named_model_config
from ..schema.objectives import NEXT_TOKEN
from ..schema.recipe import Recipe
from ..schema.sections import ModelOptions
from .loading import initial_config, load_pretrained
from .objectives import objective_of
from .parameters import ATTENTION, attention_layers, set_trainable

COPIED_FILES = ("conversion.json", *LICENCE_FILES)
"""Files of the initial model that are copied to the trained model, since they still apply."""
USE_ITS_SOURCE = "use the model that this one was converted from"
COMPARED = ("model_type", "mixers", "expert_bias")
"""Configuration keys that must be the same in the loaded model and in `model.config`, even if that omits them."""
TEACHER_WITH_ZERO3 = (
    "distillation.teacher is not possible with DeepSpeed ZeRO-3, which would shard it: use distillation.logits, made "
    "before the run, or FSDP2"
)


def load_models(recipe: Recipe, processor: Any) -> tuple[Any, Any]:
    """Load the model, prepared for training, and the teacher or None.

    Call it before the data are opened, so that it fails before a tokenisation that may take hours.
    """
    from transformers import set_seed
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    model, options, teacher = load_model(recipe, processor), recipe.distillation, None
    check_expert_bias(model.config, recipe.train.expert_bias_rate)
    if options is not None and options.teacher is not None:
        if is_deepspeed_zero3_enabled():
            raise RecipeError(TEACHER_WITH_ZERO3)
        teacher = load_teacher(recipe, model.config.vocab_size, processor)
        if recipe.attention_loss_steps:
            check_layers_match(model, teacher, recipe.attention_loss_steps)
    if recipe.data.separate_documents and not is_deepspeed_zero3_enabled():
        check_documents_apart(model, "model")
    if recipe.train.checkpoint_activations:
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable", "enable_gradient_checkpointing")
        try:
            next(getattr(model, name) for name in names if hasattr(model, name))()
        except ValueError as error:  # raised by transformers' ALBERT
            reason = one_line(error)
            raise RecipeError(f"train.checkpoint_activations=true is not possible with this model: {reason}") from None
    set_seed(recipe.train.seed)
    return set_trainable(model, recipe.train), teacher


def check_layers_match(model: Any, teacher: Any, steps: int) -> None:
    """Raise `RecipeError` if the attention outputs of model and teacher cannot be compared layer by layer."""
    for key in ("num_hidden_layers", "hidden_size"):
        teacher_size, size = getattr(teacher.config, key), getattr(model.config, key)
        if teacher_size != size:
            raise RecipeError(
                f"distillation.transfer_steps and match_steps, together {steps}, compare layers, but the teacher has "
                f"{key}={teacher_size}, the model {size}: use 0 for both, or {USE_ITS_SOURCE}"
            )
    count, teacher_count = len(attention_layers(model)), len(attention_layers(teacher))
    if not count or count != teacher_count:
        raise RecipeError(
            f"distillation.transfer_steps and match_steps, together {steps}, compare layers that are named "
            f"{ATTENTION[1:]!r}: the model, a {type(model).__name__}, has {count}, the teacher, a "
            f"{type(teacher).__name__}, {teacher_count}: use 0 for both"
        )


@torch.no_grad()
def check_documents_apart(model: Any, key: str) -> None:
    """Raise `RecipeError` if tokens attend to another document: some stock models ignore `position_ids`.

    Two windows of two documents differ only in the first document; the logits of the second must be equal.
    """
    if hasattr(model.config, "mixers"):  # crosshead models keep documents apart
        return
    first, second = torch.arange(8), torch.cat([torch.arange(8, 12), torch.arange(4, 8)])
    tokens = torch.stack([first, second]) % model.config.vocab_size
    positions = torch.arange(4).repeat(2).expand_as(tokens)
    training = model.training
    logits = model.eval()(input_ids=tokens, position_ids=positions, use_cache=False).logits[:, 4:].float()
    model.train(training)
    if (logits[0] - logits[1]).abs().max() > 0.01 * logits.abs().max():
        raise RecipeError(
            f"data.separate_documents=true is not possible with this {key}, a {type(model).__name__}: it reads the "
            "document before, too; use false"
        )


def load_model(recipe: Recipe, processor: Any) -> Any:
    """Return the model to train, in float32: loaded from `model.path`, or random with the recipe's seed."""
    options, objective, trained = recipe.model, recipe.objective, objective_of(recipe)
    config = initial_config(recipe)
    if options.path is None:
        trained.complete_config(config, processor)
        with torch.random.fork_rng(devices=[]), named_model_config():
            torch.manual_seed(recipe.train.seed)
            return trained.new_model(config)
    new_head = trained.new_head(processor)
    model = _load(objective.auto_class, options.path, "model.path", torch.float32, options, new_head)
    if new_head:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.train.seed)
            replace_head(model, trained.new_model(model.config))
    _remove_tokens(model)
    if options.config is not None:
        check_expected(model.config, model_config(options.config, objective), options.config)
    return model


def _remove_tokens(model: Any) -> None:
    """Remove access tokens from the model's configurations, which are saved in checkpoints and sent to trackers."""
    for config in filter(None, (model.config, getattr(model, "generation_config", None))):
        content = config.to_dict()
        clean, _ = without_tokens(content)
        for name, value in content.items():
            if name not in clean:
                delattr(config, name)
            elif clean[name] != value:
                setattr(config, name, clean[name])


def copied_files(options: ModelOptions) -> list[Path]:
    """Return those files of the initial model that are in `COPIED_FILES`."""
    if options.path is None:
        return []
    folder = Path(options.path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        name, revision = split_revision(options.path)
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(COPIED_FILES)))
    paths = [folder / name for name in COPIED_FILES if (folder / name).is_file()]
    for path in paths:
        if (target := foreign_link(path, folder)) is not None:
            raise RecipeError(f"{path} is a link to {target}, which would be copied: replace it by the file")
        if path.suffix != ".json" and TOKEN.search(path.read_text(encoding="utf-8", errors="replace")):
            raise RecipeError(f"{path} contains an access token: remove it from the file and revoke it")
    return paths


def load_teacher(recipe: Recipe, vocabulary: int, tokenizer: Any) -> Any:
    """Load the teacher, frozen and in its stored dtype; check its vocabulary, its context and separate documents."""
    name, length = str(recipe.distillation and recipe.distillation.teacher), recipe.data.length
    teacher = _load(NEXT_TOKEN.auto_class, name, "distillation.teacher", "auto").eval().requires_grad_(False)
    size, highest = teacher.config.vocab_size, max(tokenizer.get_vocab().values(), default=-1)
    if not highest < size <= vocabulary:
        raise RecipeError(
            f"distillation.teacher={name} has {size} tokens, but the tokenizer has {highest + 1} and the model "
            f"{vocabulary}: {USE_ITS_SOURCE}"
        )
    context = getattr(teacher.config, "max_position_embeddings", None) or length
    if length > context:
        raise RecipeError(
            f"data.length={length} is above the context of distillation.teacher={name}: use at most {context}"
        )
    if recipe.data.separate_documents:
        check_documents_apart(teacher, "distillation.teacher")
    return teacher


def replace_head(model: Any, other: Any) -> None:
    """Replace all children but the backbone by those of `other`, a model of the same class."""
    for name, part in other.named_children():
        if name != model.base_model_prefix:
            setattr(model, name, part)


def _load(
    auto_class: str,
    name: str,
    key: str,
    dtype: Any,
    options: ModelOptions | None = None,
    new_head: dict[str, Any] | None = None,
) -> Any:
    """Load a model from safetensors; raise `RecipeError` if tensors are missing or have wrong shapes.

    With `new_head`, changes to the configuration, tensors outside of the backbone may be missing or mismatched.
    """
    model, report = load_pretrained(
        getattr(transformers, auto_class),
        key,
        name,
        options,
        dtype=dtype,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # checked below
        trust_remote_code=False,
        **(new_head or {}),
    )

    def is_replaced(tensor: str) -> bool:
        return bool(new_head) and not tensor.startswith(f"{model.base_model_prefix}.")

    missing = sorted(tensor for tensor in report["missing_keys"] if not is_replaced(tensor))
    if missing:
        lacks = f"{key}={name} is incomplete: it lacks {len(missing)} tensors, the first is {missing[0]}"
        prefix = model.base_model_prefix
        if prefix not in dict(model.named_children()) or any(tensor.startswith(f"{prefix}.") for tensor in missing):
            raise RecipeError(lacks)
        new = ", or train a new classifier with objective.new_classifier=true" if auto_class == CLASSIFIERS else ""
        raise RecipeError(f"{lacks}: use a checkpoint that was saved by {type(model).__name__}{new}")
    mismatched = [entry for entry in report["mismatched_keys"] if not is_replaced(entry[0])]
    for tensor, stored, expected in sorted(mismatched)[:1]:
        raise RecipeError(
            f"{key}={name} has {tensor} of shape {tuple(stored)}, but its config.json implies {tuple(expected)}: use "
            "the config.json that was saved with its weights"
        )
    return model


def check_expected(config: Any, expected: Any, given: Iterable[str]) -> None:
    """Raise `RecipeError` if the loaded configuration differs from `expected` in a `given` key or in `COMPARED`."""
    for key in dict.fromkeys([*given, *COMPARED]):
        value = getattr(expected, key, None)
        if (actual := getattr(config, key, value)) != value:
            raise RecipeError(
                f"model.path has {key}={actual!r}, but model.config has {value!r}: name the model of this recipe, or "
                "change model.config"
            )
