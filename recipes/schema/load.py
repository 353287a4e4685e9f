"""Reads a recipe from a YAML file and the command line, and checks it."""

from collections.abc import Sequence
from os.path import expanduser
from pathlib import Path
from typing import Any

import yaml

from crosshead.common.errors import RecipeError
from crosshead.modeling.options import unknown

from .recipe import Recipe
from .text_values import NOTHING, read_section

FOLDERS = ("papers", "small")
"""Where the shipped recipes lie, beside this file."""


class _Loader(yaml.BaseLoader):  # type: ignore[misc]  # yaml brings no types
    """Every scalar stays text, as YAML 1.1 would read the key `on` as true and `1e-5` as text; no key stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping; the base class would let the last value of a key win."""
        found = set()
        for key, _ in node.value:
            if str(key.value) in found:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
            found.add(str(key.value))
        return super().construct_mapping(node, deep)


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come along, by name, as in `small/smollm2_knocking`."""
    here = Path(__file__).parents[1]
    found = [path for folder in FOLDERS for path in sorted((here / folder).glob("*.yaml"))]
    return {path.relative_to(here).with_suffix("").as_posix(): path for path in found}


def load_recipe(name: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """The recipe in a file, or the shipped one of that name; `changes` are `section.key=value`."""
    path = _find(str(name))
    try:
        content = _parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"the recipe {path} cannot be read: {' '.join(str(error).split())}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise RecipeError(f"the recipe {path} is not YAML: {' '.join(str(error).split())}") from None
    for change in changes:
        _change(content, change)
    if isinstance(content, dict):
        content = {name: part if name == "data" else _at_home(part) for name, part in content.items()}
    try:
        return read_section(Recipe, content, "")
    except ValueError as error:
        raise RecipeError(f"{path}: {error}") from None


def _parse(text: str) -> Any:
    content = yaml.load(text, Loader=_Loader)
    return "" if content is None else _apart(content)  # as an empty value inside a document is


def _apart(content: Any) -> Any:
    """What an anchor names twice as two, so that one may change alone."""
    if isinstance(content, dict):
        return {key: _apart(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_apart(value) for value in content]
    return content


def _at_home(content: Any) -> Any:
    """With the user's folder for `~/`; where data lie, that is done as they are read."""
    if isinstance(content, dict):
        return {key: _at_home(value) for key, value in content.items()}
    return expanduser(content) if isinstance(content, str) and content.startswith("~/") else content


def _find(name: str) -> Path:
    path, shipped = Path(name), shipped_recipes()
    if path.exists():
        return path
    if name.partition("/")[0] in FOLDERS:
        known = shipped.get(name.removesuffix(".yaml"))
        if known is None:
            raise RecipeError(str(unknown("the package", "recipe", name, list(shipped))))
        return known
    return path


def _change(content: Any, change: str) -> None:
    """Put one value of the command line in its place."""
    key, equals, text = change.partition("=")
    if not equals or not all(key.split(".")):
        raise RecipeError(f"--set {change!r} is not key=value, as in train.learning_rate=1e-5")
    try:
        value = _parse(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise RecipeError(f"--set {change!r} is not YAML: {' '.join(str(error).split())}") from None
    *sections, last = key.split(".")
    for section in sections:
        place = _place(content, section, change)
        if isinstance(content, dict) and content.get(section, "") in NOTHING:
            content[section] = {}
        content = content[place]
    content[_place(content, last, change)] = value


def _place(content: Any, part: str, change: str) -> str | int:
    """A part of a key as what it is in a mapping or in a list."""
    if isinstance(content, dict):
        return part
    if isinstance(content, list) and part.isdecimal() and int(part) < len(content):
        return int(part)
    raise RecipeError(f"--set {change!r}: there is no {part!r} in {content!r}")
