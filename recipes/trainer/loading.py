"""Load the tokenizer of a recipe and stored configurations, with helpful error messages."""

from pathlib import Path
from typing import Any

from crosshead.common.access_tokens import without_tokens
from crosshead.common.errors import RecipeError
from crosshead.common.fingerprint import files_digest
from crosshead.common.model_location import ADAPTER, LOADER_STATE, check_layers, failed_load, pretrained_arguments
from crosshead.common.plain_text import has_vocabulary

from ..schema.model_config import check_model_type, model_config
from ..schema.recipe import Recipe
from ..schema.sections import ModelOptions


def load_tokenizer(recipe: Recipe) -> Any:
    """Load the tokenizer of the training data, which is also saved with the trained model."""
    from transformers import AutoTokenizer

    options = recipe.model
    key = "model.tokenizer" if options.tokenizer else "model.path"
    name = str(options.tokenizer or options.path)
    check_no_adapters(options.path)
    tokenizer = load_pretrained(AutoTokenizer, key, name, options, "the tokenizer of ", trust_remote_code=False)
    if not hasattr(tokenizer, "backend_tokenizer"):
        kind = type(tokenizer).__name__
        raise RecipeError(
            f"the tokenizer of {key}={name}, {kind}, has no tokenizer.json (a fast version): use one that has"
        )
    if not has_vocabulary(tokenizer):
        raise RecipeError(f"{key}={name} has no tokenizer with a vocabulary: copy the tokenizer's files into it")
    # Some settings become entries of the vocabulary, so that an access token in them could not be removed later.
    if without_tokens(tokenizer.init_kwargs)[1]:
        raise RecipeError(
            f"the tokenizer of {key}={name} contains an access token: remove it from tokenizer_config.json"
        )
    templates = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    if bad := next((template for template in templates if Path(template).name != template), None):
        raise RecipeError(f"the tokenizer of {key}={name} has a chat template named {bad!r}, a path: rename it")
    for state in LOADER_STATE:  # otherwise they would be saved with the tokenizer
        tokenizer.init_kwargs.pop(state, None)
    return tokenizer


def initial_config(recipe: Recipe) -> Any:
    """Return the configuration of the model to train; raise `RecipeError` if the objective cannot train it."""
    options = recipe.model
    if options.path is None:
        return model_config(options.config or {}, recipe.objective)
    config = load_config(options.path, "model.path", options)
    check_model_type(config.model_type, recipe.objective)
    return config


def load_config(name: str, key: str, options: ModelOptions | None = None) -> Any:
    """Load the configuration of a stored model; `key` is the recipe key that names the model."""
    from transformers import AutoConfig

    if key == "model.path":
        check_no_adapters(name)
    config = load_pretrained(AutoConfig, key, name, options, trust_remote_code=False)
    check_layers(config, f"{key}={name}", RecipeError)
    return config


def check_no_adapters(path: str | None) -> None:
    """Raise `RecipeError` if the folder has peft adapters: transformers would load the weights of the base model."""
    if path is not None and (Path(path) / ADAPTER).is_file():
        raise RecipeError(
            f"model.path={path} has adapters of peft: merge them into their model with merge_and_unload(), save that "
            "in a new folder with its tokenizer, and use it"
        )


def weights_identity(name: str, config: Any) -> str:
    """Return an identity of a model's weights: its commit on the Hub, or a digest of a folder's weight files."""
    folder = Path(name)
    if not folder.is_dir():
        return str(getattr(config, "_commit_hash", None))
    # Regular files only: a device file might not end.
    return files_digest(sorted(path for path in folder.glob("*.safetensors") if path.is_file()))[:16]


def load_pretrained(
    kind: Any, key: str, name: str, options: ModelOptions | None = None, part: str = "", **arguments: Any
) -> Any:
    """Call `kind.from_pretrained` for the model that a recipe's `key` names; `RecipeError` if it cannot be loaded.

    The message begins with `part`, such as "the tokenizer of ", and quotes `model.convert` if it applies.
    """
    try:
        return kind.from_pretrained(**pretrained_arguments(name), **arguments)
    except Exception as error:  # damaged files raise many exception types
        reason = failed_load(error, Path(name))
    if Path(name).is_dir():
        raise RecipeError(f"{part}{key}={name} cannot be loaded: {reason}")
    advice = ""
    if options is not None and options.convert is not None and name == options.path:
        lines = options.convert.replace("\\\n", " ").strip().splitlines()
        advice = f"; make it with `{' && '.join(' '.join(line.split()) for line in lines)}`"
    place = f"{part}{key}={name} is not a folder, and cannot be loaded from the Hub"
    raise RecipeError(f"{place}: {reason.rstrip('.')}{advice}")
