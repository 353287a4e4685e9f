"""Options of a conversion, without its mechanisms, and their sources: the command line and a YAML recipe."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from crosshead.common.errors import ConversionError
from crosshead.common.model_location import expand_home
from crosshead.common.torch_state import check_device
from crosshead.common.validation import first_error_message
from crosshead.common.yaml_text import read_yaml

from .sources.tensor_store import DTYPE_NAMES

CALIBRATION_SUFFIX = ".safetensors"
"""File suffix of a saved calibration."""
MAX_INTEGER = 2**32 - 1
DATASET = "datasets:"
"""Prefix of a --calibration value that names a dataset on the Hub."""
UserPath = Annotated[Path, AfterValidator(expand_home)]
"""A path that may begin with `~`."""
PATHS = ("calibration", "save_calibration")
"""Options that are paths."""


def is_dataset(calibration: str | Path) -> bool:
    """True if a --calibration value names a dataset on the Hub."""
    return str(calibration).startswith(DATASET)


class Options(BaseModel):
    """Options of a conversion, without its mechanisms."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    revision: str | None = None
    vocab_size: Annotated[int, Field(ge=1, le=MAX_INTEGER)] | None = None
    """Vocabulary size to increase the embeddings to."""
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    calibration: UserPath | None = None
    """Text, documents, images, a saved calibration, or `datasets:NAME`; None for the default text."""
    save_calibration: UserPath | None = None
    layers: Literal["auto"] | None = None
    budget: Annotated[float, Field(gt=0, lt=1)] | None = None
    """KV cache of the result as a fraction of the source's, for `layers="auto"`."""
    active: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Active heads of `mixture` to choose, as a fraction of all heads."""
    seed: Annotated[int, Field(ge=0, le=MAX_INTEGER)] = 0
    allow_inexact: bool = False
    """Allow options whose initial outputs differ much from the source's."""
    device: Literal["cpu", "cuda"] | None = None
    """Device for calibration and for verification."""

    @classmethod
    def of(cls, options: Mapping[str, Any], where: str = "--") -> Self:
        """Return the validated options; raise `ConversionError` with one line that begins with `where`."""
        try:
            return cls.model_validate(options)
        except ValidationError as error:
            raise ConversionError(first_error_message(error, ["mixers", *cls.model_fields], where)) from None

    @model_validator(mode="before")
    @classmethod
    def _read_budgets(cls, values: Any) -> Any:
        """Convert percentages to fractions, and replace `cache` by `layers="auto"` and a budget."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        for option, whole in (("active", "all heads"), ("budget", "the source's KV cache")):
            if values.get(option) is not None:
                values[option] = _fraction(option, values[option], whole)
        if (cache := values.pop("cache", None)) is None:
            return values
        for other in ("layers", "budget"):
            if values.get(other) is not None:
                raise ValueError(f"--cache and --{other} both set the budget of the KV cache: give --cache alone")
        return values | {"layers": "auto", "budget": _fraction("cache", cache, "the source's KV cache")}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.layers is None) != (self.budget is None):
            raise ValueError("--layers auto and --budget must be given together: give both or neither")
        check_device(self.device or "cpu", ConversionError)
        saved = self.save_calibration
        if saved is not None and (saved.suffix != CALIBRATION_SUFFIX or not saved.parent.is_dir() or saved.is_dir()):
            raise ValueError(
                f"--save-calibration {saved} is not allowed: name a {CALIBRATION_SUFFIX} file in an existing folder"
            )
        if saved is not None and not os.access(saved.parent, os.W_OK | os.X_OK):
            raise ValueError(f"--save-calibration {saved} cannot be written: name a file in another folder")
        return self

    @property
    def stored_dtype(self) -> str | None:
        """Name of `dtype` in safetensors; None to keep the dtypes of the source."""
        return DTYPE_NAMES[getattr(torch, self.dtype)] if self.dtype else None

    def recorded(self) -> dict[str, Any]:
        """Return the options that conversion.json records: all that are set, except local paths."""
        options = self.model_dump(exclude=set(PATHS)).items()
        return {key: value for key, value in options if value is not None and value is not False}


def _fraction(option: str, value: Any, whole: str) -> float:
    """Return a percentage or a number between 0 and 1 as a fraction; `ValueError` for other values."""
    text = str(value)
    number = as_number(text.removesuffix("%"))
    fraction = number / 100 if text.endswith("%") and not isinstance(number, str) else number
    if isinstance(fraction, str) or not 0 < fraction < 1:
        raise ValueError(f"--{option} {text} is not allowed: give a part of {whole}, such as 50%")
    return float(fraction)


def as_number(text: Any) -> Any:
    """Return a string as an int or a float if it is a number, and other values unchanged."""
    for number in (int, float) if isinstance(text, str) else ():
        with suppress(ValueError):
            return number(text)
    return text


def split_argument(argument: str) -> tuple[str, dict[str, str]]:
    """Split `NAME[:key=value,...]` into the mechanism's name and its options."""
    name, _, rest = argument.partition(":")
    options: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise ConversionError(f"--mixer {argument!r}: {part!r} is not key=value; join lists by +, as in a+b")
        if key in options:
            raise ConversionError(f"--mixer {argument!r} gives {key!r} twice: give it once")
        options[key] = value
    return name, options


def with_recipe(
    recipe: Path | None, arguments: Sequence[str], command_options: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the mechanisms and the options from a recipe and the command line, which has precedence.

    Mechanisms on the command line replace all mechanisms of the recipe.
    """
    content = {} if recipe is None else read_recipe(recipe)
    mixers = content.pop("mixers", {})
    requested: dict[str, Any] = {}
    for name, options in map(split_argument, arguments):
        if name in requested:
            raise ConversionError(f"--mixer {name} is given twice: join its options, as in {name}:a=1,b=2")
        requested[name] = options
    set_options = {key: value for key, value in command_options.items() if value is not None and value is not False}
    if "cache" in set_options:  # `cache` in a recipe was converted to both
        content = {key: value for key, value in content.items() if key not in ("layers", "budget")}
    return requested or mixers, content | set_options


def read_recipe(path: Path) -> dict[str, Any]:
    """Return the options and `mixers` of a YAML recipe; relative paths are resolved against the recipe's folder."""
    content = read_yaml(path, f"--recipe {path}", ConversionError)
    if not isinstance(content, dict):
        raise ConversionError(f"--recipe {path} has no options: use `mixers:` and options, one per line")
    mixers = content.pop("mixers", None) or {}
    if not isinstance(mixers, dict):
        raise ConversionError(f"--recipe {path}: mixers={mixers!r} is not a mapping of mechanism to options")
    for key in PATHS:
        if isinstance(value := content.get(key), str) and not is_dataset(value):
            content[key] = path.parent / expand_home(value)
    options = Options.of(content, f"--recipe {path}: ").model_dump(exclude_unset=True)
    return options | (
        {"mixers": {name: mixer_options or {} for name, mixer_options in mixers.items()}} if mixers else {}
    )
