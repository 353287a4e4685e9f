"""Load and validate a recipe from a YAML file with `--set` changes, and generate the JSON schema of recipes."""

import json
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from crosshead.common.errors import RecipeError
from crosshead.common.yaml_text import NULL, parse_yaml, read_yaml
from crosshead.modeling.options import unknown

from .objectives import OBJECTIVES
from .recipe import Recipe

ADAPTER = TypeAdapter(Recipe)
PACKAGE = Path(__file__).parents[1]
FOLDERS = ("papers", "small")
"""Folders of the recipes that are shipped with the package."""
EXPECTED = {
    "dataclass_type": "input should be a mapping, one `key: value` a line",
    "dict_type": "input should be a mapping, one `key: value` a line",
    "tuple_type": "input should be a list, as in [a, b]",
    "too_short": "input should have at least {min_length} entries",
    "too_long": "input should have at most {max_length} entries",
}
"""pydantic error type -> message in YAML terms, where pydantic's own message uses Python terms; with its fields."""


def shipped_recipes() -> dict[str, Path]:
    """Return the paths of the shipped recipes, by name, such as `small/smollm2_knocking`."""
    paths = [path for folder in FOLDERS for path in sorted((PACKAGE / folder).glob("*.yaml"))]
    return {path.relative_to(PACKAGE).with_suffix("").as_posix(): path for path in paths}


def load_recipe(name: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """Load a recipe from a file, or a shipped recipe by its name; each of `changes` is `section.key=value`."""
    path = _find(str(name))
    content = read_yaml(path, f"the recipe {path}", RecipeError)
    for change in changes:
        _change(content, change)
    try:
        return ADAPTER.validate_python(content)
    except ValidationError as error:
        raise RecipeError(f"{path}: {_message(error)}") from None


def json_schema() -> str:
    """Return the JSON schema of recipes, which editors use for completion and validation."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | ADAPTER.json_schema()
    return json.dumps(schema, indent=2) + "\n"


def _find(name: str) -> Path:
    path, shipped = Path(name), shipped_recipes()
    if path.exists() or name.partition("/")[0] not in FOLDERS:
        return path
    if name.removesuffix(".yaml") not in shipped:
        raise RecipeError(str(unknown("the package", "recipe", name, list(shipped))))
    return shipped[name.removesuffix(".yaml")]


def _message(errors: ValidationError) -> str:
    """Format the first error as one line: key, value and expected input. Unknown keys are reported first."""
    error: Any = min(errors.errors(), key=lambda item: item["type"] != "unexpected_keyword_argument")
    *path, key = map(str, error["loc"] or [""])
    section = [part for part in path if part not in OBJECTIVES]
    name = ".".join(section) or "the recipe"
    if error["type"] == "value_error":  # raised in the __post_init__ of a section
        return ".".join([*section, key, str(error["ctx"]["error"])]).removeprefix(".")
    if error["type"] == "unexpected_keyword_argument":
        return str(unknown(name, "key", key, _keys(path)))
    if error["type"] == "union_tag_invalid":
        return str(unknown(key, "name", error["ctx"]["tag"], list(OBJECTIVES)))
    if error["type"] == "union_tag_not_found":
        return f"{key}={error['input']!r:.100}: give a mapping with the key 'name', one of {', '.join(OBJECTIVES)}"
    if error["type"] == "missing":
        return f"{name} lacks the key {key!r}, which has no default"
    expected = error["msg"][0].lower() + error["msg"][1:]
    if error["type"] in EXPECTED:
        expected = EXPECTED[error["type"]].format(**error.get("ctx", {}))
    return f"{'.'.join([*section, key]) or 'the recipe'}={error['input']!r:.100}: {expected}"


def _keys(section: Sequence[str]) -> list[str]:
    """Return the valid keys of a section, given by its path in the recipe."""
    kind: Any = Recipe
    for part in section:
        if part in OBJECTIVES:
            kind = OBJECTIVES[part]
        elif not part.isdecimal():
            kind = get_type_hints(kind)[part]
            kind = next((member for member in get_args(kind) if is_dataclass(member)), kind)
    return [field.name for field in fields(kind)]


def _change(content: Any, change: str) -> None:
    """Apply one `--set` change to the parsed YAML, in place."""
    key, equals, text = change.partition("=")
    if not equals or not all(key.split(".")):
        raise RecipeError(f"--set {change!r} is not key=value, as in train.learning_rate=1e-5")
    try:
        value = parse_yaml(text)
    except ValueError as error:
        raise RecipeError(f"--set {change!r} is {error}") from None
    *sections, last = key.split(".")
    for section in sections:
        if isinstance(content, dict) and content.get(section, "") in NULL:
            content[section] = {}
        content = content[_index(content, section, change)]
    content[_index(content, last, change)] = value


def _index(content: Any, part: str, change: str) -> str | int:
    """Return one part of a dotted key as a mapping key or a list index, depending on the container."""
    if isinstance(content, dict):
        return part
    if isinstance(content, list) and part.isdecimal() and int(part) < len(content):
        return int(part)
    allowed = f"an index from 0 to {len(content) - 1}" if isinstance(content, list) and content else "an existing key"
    raise RecipeError(f"--set {change!r}: there is no {part!r} in {content!r:.100}; use {allowed}")
