"""Splits Python's help topics into a part to score models on, and a part for calibration and training.

The offline suite scores the beginnings of the first topics. Calibration and training read the later topics, without
paragraphs that also occur in the scored part.
"""

from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from crosshead.common.atomic_write import write_atomically
from crosshead.evals.harness.lm_eval_model import quiet
from crosshead.evals.harness.tasks import load_tasks, read_suite

PARAGRAPH = "\n\n"
"""Separator of paragraphs."""


def write_texts(limit: int, to_learn: Path) -> None:
    """Write the text for calibration and training to `to_learn`; `limit` is the number of scored documents."""
    write_atomically({to_learn: text_to_learn(scored_topics(limit))})


def scored_topics(limit: int) -> dict[str, str]:
    """Topic -> its scored part, for the topics that the offline suite scores."""
    benchmarks = read_suite("offline").benchmarks
    with quiet():
        loaded = load_tasks(benchmarks, None, run_code=False)
    documents = [list(task.test_docs())[:limit] for group in loaded for task in group.members]
    return {item["topic"]: item["text"] for items in documents for item in items if "topic" in item}


def text_to_learn(scored: dict[str, str]) -> str:
    """The text of all topics after the last scored one, without paragraphs of scored parts."""
    known = {_words(paragraph) for text in scored.values() for paragraph in _paragraphs(text)}
    later = "\n".join(topics[name] for name in sorted(topics) if name > max(scored))
    unscored = [paragraph for paragraph in _paragraphs(later) if _words(paragraph) not in known]
    return PARAGRAPH.join(unscored) + "\n"


def _paragraphs(text: str) -> Iterator[str]:
    return filter(str.strip, text.split(PARAGRAPH))


def _words(paragraph: str) -> str:
    """The words of a paragraph separated by single spaces."""
    return " ".join(paragraph.split())
