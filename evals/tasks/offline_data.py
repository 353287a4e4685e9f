"""The data of the offline tasks. lm_eval loads this file by its path, so it does not import crosshead."""

import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

MINIMUM, MAXIMUM = 1000, 1500
"""Characters: a shorter topic is left out, and a longer topic is cut after a paragraph."""


def grammar(**_metadata: Any) -> dict[str, Any]:
    """Pairs of sentences, of which one is correct."""
    from datasets import Dataset

    lines = Path(__file__).with_name("crosshead_grammar.jsonl").read_text(encoding="utf-8").splitlines()
    return {"test": Dataset.from_list([json.loads(line) for line in lines])}


def prose(**_metadata: Any) -> dict[str, Any]:
    """The beginnings of the topics of `help()`."""
    from datasets import Dataset

    found = [{"topic": name, "text": beginning(topics[name])} for name in sorted(topics)]
    return {"test": Dataset.from_list([document for document in found if len(document["text"]) >= MINIMUM])}


def beginning(text: str) -> str:
    """As many complete paragraphs as fit."""
    end = text.rfind("\n\n", 0, MAXIMUM + 2) if len(text) > MAXIMUM else len(text)
    return text[: max(end, 0)].strip()
