"""A model's card: made from facts, put into its folder, and read back as the Hub would."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard

from .errors import CardError
from .evaluations import KEPT, kept
from .facts import Facts
from .measured import measured
from .metadata import metadata
from .papers import MECHANISMS
from .sections import changed, citation, cost, limits, made, opening, use

README = "README.md"
LICENCE_KEYS = ("license", "license_name", "license_link")
MARK = re.compile(r"\n<!-- made by crosshead; (?P<digest>[0-9a-f]{16}) -->\n\Z")
NAME = re.compile(r"(?:[\w-]+/)?[\w.-]+")
"""What the Hub takes for a dataset in a result."""


def card_text(facts: Facts) -> str:
    """The whole card, with a mark at its end by which an edited one is told."""
    unknown = next((name for name in facts.mixers if name not in MECHANISMS), None)
    if unknown is not None:
        raise CardError(f"{facts.name} has the mechanism {unknown!r}, which this crosshead does not know: update it")
    parts = chain(*(part(facts) for part in (opening, changed, cost, measured, made, use, limits, citation)))
    text = f"---\n{metadata(facts).to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n"
    return f"{text}\n<!-- made by crosshead; {_digest(text)} -->\n"


def is_edited(text: str) -> bool:
    """Whether somebody has written it, or in it, since a command made it."""
    mark = MARK.search(text)
    return mark is None or _digest(text[: mark.start()]) != mark["digest"]


def card_files(folder: Path, facts: Facts, overwrite: bool) -> dict[Path, str]:
    """The card, first, and the scores that are on it; what the card there knew of its origin is not forgotten."""
    path = folder / README
    before = path.read_text(encoding="utf-8") if path.is_file() else None
    if before is not None and not overwrite and is_edited(before):
        raise CardError(f"{path} was written or edited by somebody: keep it, or add --overwrite to replace it")
    contents = {path: card_text(replace(facts, **_remembered(facts, before)))}
    if facts.evaluations:
        contents[folder / KEPT] = json.dumps(kept(facts.evaluations), indent=2, ensure_ascii=False) + "\n"
    check_card(contents[path], path)
    return contents


def check_card(text: str, path: Path) -> ModelCard:
    """The card as the Hub's client reads it; `CardError` where its head is not what the Hub wants."""
    try:
        card = ModelCard(text)
        data: Any = card.data
        content = data.to_dict()
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise CardError(f"the head of {path} cannot be read: {' '.join(str(error).split())[:200]}") from error
    if not text.startswith("---\n") or content.get("library_name") != "transformers":
        raise CardError(f"{path} does not say `library_name: transformers` in its head: make it with `crosshead card`")
    for result in data.eval_results or ():
        if not NAME.fullmatch(result.dataset_type):
            raise CardError(f"{path} has a result on {result.dataset_type!r}, which is no name for the Hub")
    return card


def _remembered(facts: Facts, before: str | None) -> dict[str, Any]:
    """The licence and the source's name that the card had, where nothing better is known."""
    if before is None:
        return {}
    try:
        head: Mapping[str, Any] = ModelCard(before, ignore_metadata_errors=True).data.to_dict()
    except (ValueError, TypeError, yaml.YAMLError):
        return {}
    found: dict[str, Any] = {}
    if not facts.licence and "license" in head:
        found["licence"] = {key: head[key] for key in LICENCE_KEYS if key in head}
    if facts.base_model is None and isinstance(head.get("base_model"), str):
        found["base_model"] = head["base_model"]
    return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
