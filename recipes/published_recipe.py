"""A recipe for publication with the trained model: without the folders of this machine."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .schema.recipe import Recipe

WORD = re.compile(r"""(?:'[^']*(?:'|$)|"(?:\\.|[^"\\])*(?:"|$)|\\.|\S)+""", re.DOTALL)
"""A word of a shell command, in which quoted or escaped spaces are allowed."""
URL = r"\b(?!(?i:file):)[\w+.-]+://\w[^\s,;'\"()]*"
"""A URL with a host, which is published as it is."""
BEGIN = r"(?:(?<![^\s=,:;@('\"<>|&{\[`\u2018\u201c\xab+!\\])|(?<=^-\w)|(?<=\s-\w))"
"""Position where a path may begin: after white space, punctuation or a short option such as `-o`."""
FOLDERS = re.compile(rf"({URL})|{BEGIN}(?:~[\w.-]*|\$\{{?HOME\}}?)?/(?=\S)(?:.*/(?=[^/]))?", re.DOTALL)
"""A URL (group 1), or the folders of an absolute path, or of several paths, up to the last component."""


def published_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as a dictionary for publication: no cache, and no folders of absolute paths.

    A local copy of a Hub dataset becomes `./name`, so that it is not mistaken for a Hub id.
    """
    content = asdict(recipe)
    del content["data"]["cache"]
    for source in (*content["data"]["sources"], *content["data"]["evaluation"]):
        if source["kind"] == "hub" and (folder := Path(source["path"])).is_dir():
            source["path"] = f"./{folder.name}"
    return without_folders(content)


def without_folders(value: Any, is_command: bool = False) -> Any:
    """Replace absolute paths, also within commands, by their last component; recurses into dicts and lists."""
    if isinstance(value, Mapping):
        return {key: without_folders(part, key == "convert") for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(part) for part in value]
    if not isinstance(value, str):
        return value
    if is_command:
        return WORD.sub(lambda word: _in_word(word[0]), value)
    shortened = FOLDERS.sub(lambda match: match[1] or "", value)
    return value if shortened == value else shortened.rstrip("/")


def _in_word(word: str) -> str:
    """Return a word of a command without folders; a word with quotes or escapes is quoted anew if it changes."""
    if not set(word) & set("'\"\\"):
        return str(without_folders(word))
    try:
        (text,) = shlex.split(word)
    except ValueError:  # a quote that is not closed
        text = word.strip("'\"")
    shortened = without_folders(text)
    return word if shortened == text else shlex.quote(shortened)
