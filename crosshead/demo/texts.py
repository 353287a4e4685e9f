"""Python's help topics in separate parts: one to score models on, one for calibration and training.

The offline suite scores prose on the beginnings of the first topics. Calibration and training read the topics after
those, without paragraphs that also stand in the scored part.
"""

from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from crosshead.evals.harness.lm_eval_model import quiet
from crosshead.evals.harness.tasks import load_tasks, read_suite

PARAGRAPH = "\n\n"


def write_texts(limit: int, to_learn: Path) -> None:
    """Write the text for calibration and training; `limit` is the number of scored documents."""
    partial = to_learn.with_name(f".{to_learn.name}.partial")
    partial.write_text(text_to_learn(scored_topics(limit)), encoding="utf-8")
    partial.replace(to_learn)


def scored_topics(limit: int) -> dict[str, str]:
    """The topics that the offline suite scores, with the scored part of each."""
    benchmarks = read_suite("offline").benchmarks
    with quiet():
        loaded = load_tasks(benchmarks, None, run_code=False)
    documents = [list(task.test_docs())[:limit] for each in loaded for task in each.members]
    return {each["topic"]: each["text"] for found in documents for each in found if "topic" in each}


def text_to_learn(scored: dict[str, str]) -> str:
    """The topics after the last scored one, without scored paragraphs."""
    known = {_words(paragraph) for each in scored.values() for paragraph in _paragraphs(each)}
    later = "\n".join(topics[name] for name in sorted(topics) if name > max(scored))
    kept = [paragraph for paragraph in _paragraphs(later) if _words(paragraph) not in known]
    return PARAGRAPH.join(kept) + "\n"


def _paragraphs(text: str) -> Iterator[str]:
    return filter(str.strip, text.split(PARAGRAPH))


def _words(paragraph: str) -> str:
    """The words, without indentation."""
    return " ".join(paragraph.split())
