"""The text that every CPython carries, in parts that do not meet: one to score on, one to learn from.

The offline suite scores prose on the beginnings of the first of Python's help topics. What a conversion is calibrated
on and a model trained on are topics that come after those, without the paragraphs that they repeat; the last fifth of
the text is left to the comparison that follows each conversion.
"""

from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from crosshead.conversion.calibration.calibrate import HELD_OUT
from crosshead.conversion.calibration.text import default_text
from crosshead.evals.harness.lm_eval_model import quiet
from crosshead.evals.harness.tasks import load_tasks, read_suite

PARAGRAPH = "\n\n"


def write_texts(limit: int, to_learn: Path) -> None:
    """Write what is to be learnt from, given how many documents are scored."""
    partial = to_learn.with_name(f".{to_learn.name}.partial")
    partial.write_text(text_to_learn(scored_topics(limit)), encoding="utf-8")
    partial.replace(to_learn)


def scored_topics(limit: int) -> dict[str, str]:
    """The topics that the offline suite scores prose on, and how much of each."""
    benchmarks = read_suite("offline").benchmarks
    with quiet():
        loaded = load_tasks(benchmarks, None, run_code=False)
    documents = [list(task.test_docs())[:limit] for each in loaded for task in each.members]
    return {each["topic"]: each["text"] for found in documents for each in found if "topic" in each}


def text_to_learn(scored: dict[str, str]) -> str:
    """The topics after the last that is scored, as far as conversions may read, without what is scored."""
    names = sorted(topics)
    before = "\n".join(topics[name] for name in names[: names.index(max(scored)) + 1])
    text = default_text()
    known = {_words(paragraph) for each in scored.values() for paragraph in _paragraphs(each)}
    later = text[len(before) + 1 : int(len(text) * HELD_OUT)]
    kept = [paragraph for paragraph in _paragraphs(later) if _words(paragraph) not in known]
    return PARAGRAPH.join(kept) + "\n"


def _paragraphs(text: str) -> Iterator[str]:
    return filter(str.strip, text.split(PARAGRAPH))


def _words(paragraph: str) -> str:
    """The same wherever it is indented."""
    return " ".join(paragraph.split())
