"""Writes and checks the model card, README.md, from the facts about a model."""

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

from crosshead.common.errors import CardError

from .commands import HUB_NAME
from .evaluations import EVALUATION
from .facts import Facts
from .measured import results
from .metadata import card_metadata, licence_of
from .papers import MECHANISMS
from .sections import changes, citation, cost, limits, opening, provenance, usage

README = "README.md"
LIBRARIES = ("transformers", "diffusers")
"""Allowed values of `library_name`."""
MARK = re.compile(r"\n<!-- made by crosshead; (?P<digest>[0-9a-f]{16}) -->\n\Z")
"""The comment at the end of a generated card, with the digest of the text before it."""


def card_text(facts: Facts) -> str:
    """The text of the card. It ends with a digest, by which `is_edited` detects manual changes."""
    unknown = next((name for name in facts.mixers if name not in MECHANISMS), None)
    if unknown is not None:
        raise CardError(
            f"{facts.name} has the mechanism {unknown!r}, which model_cards/papers.py does not describe: update "
            "crosshead, or add your mechanism there"
        )
    parts = chain(*(part(facts) for part in (opening, changes, cost, results, provenance, usage, limits, citation)))
    text = f"---\n{card_metadata(facts).to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n"
    return f"{text}\n<!-- made by crosshead; {_digest(text)} -->\n"


def is_edited(text: str) -> bool:
    """True if a card was written by hand, or edited after crosshead wrote it."""
    mark = MARK.search(text)
    return mark is None or _digest(text[: mark.start()]) != mark["digest"]


def card_files(folder: Path, facts: Facts, overwrite: bool) -> dict[Path, str]:
    """The files to write, path -> content: the card first, then its scores if it has any.

    Licence and base model of an existing card are kept if the facts have none. `CardError` if the existing card was
    edited by hand, unless `overwrite`.
    """
    path = folder / README
    before = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
    if before is not None and not overwrite and is_edited(before):
        raise CardError(f"{path} was edited by hand: add --overwrite to replace it")
    contents = {path: card_text(replace(facts, **_kept_metadata(facts, before)))}
    if facts.evaluations:
        scores = {"evaluations": list(facts.evaluations)}
        contents[folder / EVALUATION] = json.dumps(scores, indent=2, ensure_ascii=False) + "\n"
    check_card(contents[path], path)
    return contents


def check_card(text: str, path: Path) -> ModelCard:
    """Parse the card with the client of the Hub; `CardError` if its metadata is not valid."""
    try:
        card = ModelCard(text)
        data: Any = card.data
        content = data.to_dict()
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise CardError(f"the metadata of {path} cannot be read: {' '.join(str(error).split())[:200]}") from error
    if not text.startswith("---\n") or content.get("library_name") not in LIBRARIES:
        raise CardError(f"{path} lacks `library_name: {LIBRARIES[0]}` in its metadata: write it with `crosshead card`")
    for result in data.eval_results or ():
        if not HUB_NAME.fullmatch(result.dataset_type):
            raise CardError(
                f"{path} has a result on {result.dataset_type!r}, which is not a valid dataset name on the Hub"
            )
    return card


def _kept_metadata(facts: Facts, before: str | None) -> dict[str, Any]:
    """Licence and base model of the existing card `before`, as fields of `Facts`, if the facts have none."""
    if before is None:
        return {}
    try:
        metadata: Mapping[str, Any] = ModelCard(before, ignore_metadata_errors=True).data.to_dict()
    except (ValueError, TypeError, yaml.YAMLError):
        return {}
    fields: dict[str, Any] = {}
    if not facts.licence:
        fields["licence"] = licence_of(metadata)
    if facts.base_model is None and isinstance(metadata.get("base_model"), str):
        fields["base_model"] = metadata["base_model"]
    return fields


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
