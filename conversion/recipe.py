"""Options of a conversion in a YAML file; options on the command line take precedence."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from crosshead.common.errors import ConversionError
from crosshead.common.yaml_text import BOOLEANS, parse_yaml
from crosshead.modeling.options import unknown

from .architectures.mixer_options import split_argument


def _whole_number(text: str) -> Any:
    return int(text) if text.isdecimal() else text


def _flag(text: str) -> bool:
    if text.lower() not in BOOLEANS:
        raise ConversionError(f"allow_inexact={text!r} is not allowed in a recipe: use true or false")
    return BOOLEANS[text.lower()]


def _decimal(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


OPTIONS: dict[str, Callable[[str], Any]] = {
    "revision": str,
    "vocab_size": _whole_number,
    "dtype": str,
    "calibration": Path,
    "save_calibration": Path,
    "layers": str,
    "budget": _decimal,
    "seed": _whole_number,
    "allow_inexact": _flag,
}
"""The options a recipe may give beside `mixers` -> how their text is read."""


def with_recipe(
    recipe: Path | None, arguments: Sequence[str], given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Mixers and options: what the command line gives, else what the recipe says.

    Mechanisms on the command line replace the recipe's as a whole.
    """
    content = {} if recipe is None else read_recipe(recipe)
    mixers = dict(content.pop("mixers", None) or {})
    named = [split_argument(argument) for argument in arguments]
    for index, (name, _) in enumerate(named):
        if name in dict(named[:index]):
            raise ConversionError(f"--mixer {name} is given twice: join its options, as in {name}:a=1,b=2")
    chosen = {key: value for key, value in given.items() if value is not None and value is not False}
    return dict(named) or mixers, content | chosen


def read_recipe(path: Path) -> dict[str, Any]:
    """The options of a recipe; the file's own folder is where its relative paths start."""
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConversionError(f"--recipe {path} cannot be read: {error}") from None
    except ValueError as error:
        raise ConversionError(f"--recipe {path} is {error}") from None
    if not isinstance(content, dict):
        raise ConversionError(f"--recipe {path} holds no options: use `mixers:` and options, one a line")
    options: dict[str, Any] = {}
    for key, value in content.items():
        if key == "mixers":
            if not isinstance(value, dict):
                raise ConversionError(f"--recipe {path}: mixers={value!r} is not a mapping of mechanism to options")
            options[key] = {name: chosen or {} for name, chosen in value.items()}
        elif key not in OPTIONS:
            raise ConversionError(str(unknown(f"--recipe {path}", "option", key, ["mixers", *OPTIONS])))
        elif not isinstance(value, str):
            raise ConversionError(f"--recipe {path}: {key}={value!r} is not one value")
        else:
            read = OPTIONS[key](value)
            options[key] = path.parent / read if isinstance(read, Path) else read
    return options
