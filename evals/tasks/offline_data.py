"""The data of the offline tasks. lm_eval loads this file by its path, so it does not import crosshead."""

import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

MINIMUM, MAXIMUM = 1000, 1500
"""Lengths of a text in characters: a shorter topic is left out, and a longer topic is cut after a paragraph."""


def grammar(**_metadata: Any) -> dict[str, Any]:
    """Return pairs of sentences, of which one is grammatical."""
    from datasets import Dataset

    lines = Path(__file__).with_name("crosshead_grammar.jsonl").read_text(encoding="utf-8").splitlines()
    return {"test": Dataset.from_list([json.loads(line) for line in lines])}


def prose(**_metadata: Any) -> dict[str, Any]:
    """Return the beginnings of the topics of `help()` as texts."""
    from datasets import Dataset

    documents = [{"topic": name, "text": beginning(topics[name])} for name in sorted(topics)]
    return {"test": Dataset.from_list([document for document in documents if len(document["text"]) >= MINIMUM])}


def beginning(text: str) -> str:
    """Return the complete paragraphs at the beginning of a text that fit into `MAXIMUM` characters."""
    end = text.rfind("\n\n", 0, MAXIMUM + 2) if len(text) > MAXIMUM else len(text)
    return text[: max(end, 0)].strip()
