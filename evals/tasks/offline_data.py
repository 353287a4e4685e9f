"""The data of the offline tasks. lm_eval reads this file by its path, so it imports nothing of ours."""

import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

SHORTEST, LONGEST = 1000, 1500
"""Characters: topics that have fewer are left out, and of a longer one the first paragraphs are read."""


def grammar(**_metadata: Any) -> dict[str, Any]:
    """Pairs of sentences, of which one is right."""
    from datasets import Dataset

    lines = Path(__file__).with_name("crosshead_grammar.jsonl").read_text(encoding="utf-8").splitlines()
    return {"test": Dataset.from_list([json.loads(line) for line in lines])}


def prose(**_metadata: Any) -> dict[str, Any]:
    """The beginnings of the texts of `help()` on the language."""
    from datasets import Dataset

    found = [{"topic": name, "text": beginning(topics[name])} for name in sorted(topics)]
    return {"test": Dataset.from_list([document for document in found if len(document["text"]) >= SHORTEST])}


def beginning(text: str) -> str:
    """The first whole paragraphs, as many as fit."""
    end = text.rfind("\n\n", 0, LONGEST + 2) if len(text) > LONGEST else len(text)
    return text[: max(end, 0)].strip()
