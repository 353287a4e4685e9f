"""Reconstructs the commands that made a model from the options in its records."""

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import yaml

from .facts import PARTS

PLAIN = {"vocab_size": "--vocab-size", "revision": "--revision", "dtype": "--dtype", "seed": "--seed"}
"""Conversion option -> command-line flag, for options with the same value in the record and on the command line."""
HUB_NAME = re.compile(r"(?:[\w-]+/)?[\w-][\w.-]*", re.ASCII)
"""Matches the dataset names that the Hub accepts."""
CHOSEN = {
    "budget": ("explicit", {"key_heads", "value_heads", "layers", "on"}),
    "active": ("mixture", {"active_heads", "shared_heads", "layers", "shared"}),
}
"""Budget -> mechanism, and its options that the budget chooses; `convert` refuses them together with the budget."""


def convert_command(record: Mapping[str, Any], name: str) -> str:
    """The `crosshead convert` or `crosshead fold` command with the recorded options; `name` is the output folder."""
    source, options = record["source"], record.get("options", {})
    words = ["crosshead", record.get("command", "convert"), _operand(source["name"]), _operand(name)]
    if record.get("command") == "fold":
        words += ["--revision", source["revision"]] if source.get("revision") else []
        return shlex.join([*words, *(["--keep-cache"] if options.get("keep_cache") else [])])
    values = {**options, "revision": source.get("revision")}
    chosen = dict(pair for budget, pair in CHOSEN.items() if options.get(budget) is not None)
    for mechanism, settings in _mixers(options):
        remaining = {key: value for key, value in settings.items() if key not in chosen.get(mechanism, ())}
        words += ["--mixer", _argument(mechanism, remaining)]
    for option, flag in PLAIN.items():
        if values.get(option) is not None:
            words += [flag, str(values[option])]
    if options.get("budget") is not None:
        words += ["--layers", "auto", "--budget", str(options["budget"])]
    if options.get("active") is not None:
        words += ["--active", str(options["active"])]
    if options.get("allow_inexact"):
        words.append("--allow-inexact")
    text = options.get("calibration") or record.get("calibration", {})
    if "sha256" in text and not text.get("default"):
        words += ["--calibration", str(text.get("text") or text.get("images") or text.get("saved"))]
    return shlex.join(words)


def _operand(name: str) -> str:
    """The name of a model or folder as an argument that is not read as an option."""
    return f"./{name}" if name.startswith("-") else name


def _mixers(options: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Mechanisms with options; for a T5 named as in `talking@encoder`, unless all parts have the same mechanisms."""
    mixers, choices = options.get("mixers", {}), options.get("choices", {})
    if any(part in mixers for part in PARTS):
        parts = [(part, mixers[part], choices.get(part, {})) for part in mixers]
        if len(parts) == len(PARTS) and all(part[1:] == parts[0][1:] for part in parts):
            parts = [("", *parts[0][1:])]
    else:
        parts = [("", mixers, choices)]
    for part, of_part, chosen in parts:
        for mechanism, settings in of_part.items():
            yield mechanism + f"@{part}" * bool(part), {**settings, **chosen.get(mechanism, {})}


def _argument(mechanism: str, options: Mapping[str, Any]) -> str:
    parts = [f"{key}={_value(value)}" for key, value in options.items() if value not in (None, [])]
    return mechanism + (":" + ",".join(parts) if parts else "")


def _value(value: Any) -> str:
    if isinstance(value, list):
        return "+".join(map(_value, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def recipe_yaml(recipe: Mapping[str, Any]) -> str:
    """The recipe as YAML for `crosshead train`, without empty values and without the directories of paths."""
    return yaml.safe_dump(_plain(recipe), sort_keys=False, allow_unicode=True, width=110).rstrip()


def _plain(value: Any, whole: bool = False) -> Any:
    """The value without empty entries and directories; `whole` keeps empty entries, which matter in `config`."""
    if isinstance(value, Mapping):
        entries = {key: part for key, part in value.items() if whole or (part is not None and part not in ([], ()))}
        return {key: _plain(part, whole or key == "config") for key, part in entries.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, whole) for part in value]
    return relative(value) if isinstance(value, str) else value


def relative(text: str) -> str:
    """The file name of an absolute path; any other text unchanged."""
    return PurePath(text).name if PurePath(text).is_absolute() else text


def datasets(recipe: Mapping[str, Any]) -> Iterator[str]:
    """The Hub names of the training datasets."""
    for source in recipe.get("data", {}).get("sources", ()):
        if source.get("kind") == "hub" and HUB_NAME.fullmatch(source["path"]):  # a local copy is not a Hub name
            yield source["path"]
