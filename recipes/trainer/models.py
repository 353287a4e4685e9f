"""Loads the model, the tokenizer and the teacher of a recipe."""

from pathlib import Path
from typing import Any

import torch

from crosshead.common.access_tokens import without_tokens
from crosshead.common.errors import RecipeError, one_line
from crosshead.common.tokenizer_state import LOADING

from ..schema.model_config import model_config, named_model_config
from ..schema.recipe import Recipe
from ..schema.sections import ModelOptions

BESIDE = ("conversion.json", "LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
"""Patterns of files of the model that is continued which stay true of the result."""
USE_ITS_SOURCE = "use the model that this one was made from"
LEFT_OUT = {"expert_bias": False}
"""What a configuration does not write down where it has this value."""


def load_tokenizer(recipe: Recipe) -> Any:
    """The tokenizer that the text is read with, and that the result carries."""
    from transformers import AutoTokenizer

    options = recipe.model
    key, name = ("model.tokenizer", options.tokenizer) if options.tokenizer else ("model.path", options.path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # its files may be broken in many ways
        raise RecipeError(f"the tokenizer of {_unloadable(key, str(name), error, options)}") from None
    if not hasattr(tokenizer, "backend_tokenizer"):
        kind = type(tokenizer).__name__
        raise RecipeError(
            f"the tokenizer of {key}={name}, {kind}, has no tokenizer.json (a fast version): use one that has"
        )
    # Some become words of the vocabulary when they are read, so they cannot be left out of the result.
    if without_tokens(tokenizer.init_kwargs)[1]:
        raise RecipeError(f"the tokenizer of {key}={name} holds an access token: take it out of tokenizer_config.json")
    for state in LOADING:  # it would be saved with the rest
        tokenizer.init_kwargs.pop(state, None)
    return tokenizer


def load_model(recipe: Recipe, tokenizer: Any) -> Any:
    """The model to train, in float32: continued, or from scratch by the recipe's seed."""
    from transformers import AutoModelForCausalLM

    options = recipe.model
    if options.path is None:
        config = model_config(options.config or {})
        config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        with torch.random.fork_rng(devices=[]), named_model_config():
            torch.manual_seed(recipe.train.seed)
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = _loaded(options.path, "model.path", torch.float32, options)
    _forget_tokens(model)
    if options.config is not None:
        check_expected(model.config, model_config(options.config))
    return model


def _forget_tokens(model: Any) -> None:
    """Access tokens in its configurations: checkpoints hold all that is in them, and trackers are told of it."""
    for config in (model.config, model.generation_config):
        content = config.to_dict()
        kept, _ = without_tokens(content)
        for name, value in content.items():
            if name not in kept:
                delattr(config, name)
            elif kept[name] != value:
                setattr(config, name, kept[name])


def files_beside(options: ModelOptions) -> list[Path]:
    """What `BESIDE` means in the folder of the model to continue."""
    if options.path is None:
        return []
    folder = Path(options.path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(options.path, allow_patterns=list(BESIDE)))
    return [path for pattern in BESIDE for path in sorted(folder.glob(pattern)) if path.is_file()]


def vocabulary_of(recipe: Recipe) -> int:
    """How many tokens the model to train knows, without loading it."""
    from transformers import AutoConfig

    options = recipe.model
    if options.path is None:
        return model_config(options.config or {}).vocab_size
    try:
        return AutoConfig.from_pretrained(options.path, trust_remote_code=False).vocab_size
    except Exception as error:
        raise RecipeError(_unloadable("model.path", options.path, error, options)) from None


def load_teacher(name: str, vocabulary: int, tokenizer: Any) -> Any:
    """The model that is learnt from, as it is stored and never changed; it reads the same tokens."""
    teacher = _loaded(name, "distillation.teacher", "auto").eval().requires_grad_(False)
    known, highest = teacher.config.vocab_size, max(tokenizer.get_vocab().values(), default=-1)
    if known > vocabulary:
        raise RecipeError(
            f"distillation.teacher={name} knows {known} tokens, the model {vocabulary}: {USE_ITS_SOURCE}"
        )
    if known <= highest:
        raise RecipeError(
            f"distillation.teacher={name} knows {known} tokens, the tokenizer's last is {highest}: {USE_ITS_SOURCE}"
        )
    return teacher


def check_matches(teacher: Any, config: Any, name: str, steps: int) -> None:
    """Attention outputs can be fitted to the teacher's, where that is asked for: as many layers of the same width."""
    for key in ("num_hidden_layers", "hidden_size") if steps else ():
        theirs, ours = getattr(teacher.config, key), getattr(config, key)
        if theirs != ours:
            raise RecipeError(
                f"distillation.match_steps={steps} compares layers, and distillation.teacher={name} has "
                f"{key}={theirs}, the model {ours}: use 0, or the model that this one was made from"
            )


def _unloadable(key: str, name: str, error: Exception, options: ModelOptions | None = None) -> str:
    """What to say of what cannot be loaded: also that its owner has yet to make it."""
    if Path(name).is_dir():
        return f"{key}={name} cannot be loaded: {one_line(error)}"
    made = ""
    if options is not None and options.convert is not None and name == options.path:
        lines = options.convert.replace("\\\n", " ").strip().splitlines()
        made = f"; make it with `{' && '.join(' '.join(line.split()) for line in lines)}`"
    return f"{key}={name} is no folder, and cannot be loaded from the Hub: {one_line(error).rstrip('.')}{made}"


def _loaded(name: str, key: str, dtype: Any, options: ModelOptions | None = None) -> Any:
    from transformers import AutoModelForCausalLM

    kind: Any = AutoModelForCausalLM
    try:
        model, report = kind.from_pretrained(
            name,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported instead
            trust_remote_code=False,
        )
    except Exception as error:
        raise RecipeError(_unloadable(key, name, error, options)) from None
    missing = sorted(report["missing_keys"])
    if missing:
        raise RecipeError(f"{key}={name} lacks {len(missing)} tensors, {missing[0]} first: it is not complete")
    mismatched = sorted(report["mismatched_keys"])
    if mismatched:
        tensor, stored, expected = mismatched[0]
        raise RecipeError(
            f"{key}={name} has {tensor} of shape {tuple(stored)}, where its config.json asks for {tuple(expected)}: "
            "use the config.json that was saved with its weights"
        )
    return model


def check_expected(found: Any, expected: Any) -> None:
    """The recipe says what the model should be: hold it to that."""
    wanted, have = LEFT_OUT | expected.to_diff_dict(), LEFT_OUT | found.to_dict()
    for key, value in wanted.items():
        if key in have and have[key] != value and key not in ("transformers_version", "dtype", "architectures"):
            raise RecipeError(f"model.path has {key}={have[key]!r}, but model.config says {value!r}")
