"""The rows of the table of one model, from what the harness found."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from crosshead.common.errors import EvalError

from .harness import Outcome
from .items import Items, items_of
from .tasks import Loaded


def score_rows(tasks: Sequence[Loaded], outcome: Outcome) -> list[tuple[dict[str, Any], Items | None]]:
    """A row for every benchmark, or for every metric where none is chosen, and the items behind it."""
    return [row for loaded in tasks for row in _rows(loaded, outcome)]


def _rows(loaded: Loaded, outcome: Outcome) -> Iterator[tuple[dict[str, Any], Items | None]]:
    benchmark = loaded.benchmark
    name = loaded.task.name if loaded.is_group else loaded.task.task_name
    found = outcome.results["results"][name]
    known = list(_metrics(found))
    if benchmark.metric is not None and (benchmark.metric, benchmark.filter) not in known:
        raise EvalError(
            f"the task {name} has no score {benchmark.metric},{benchmark.filter} in the installed lm_eval: it has "
            f"{' and '.join(','.join(pair) for pair in known)}"
        )
    for metric, chosen in known if benchmark.metric is None else [(benchmark.metric, benchmark.filter)]:
        items = items_of(loaded, outcome.results, metric, chosen)
        yield _row(loaded, name, metric, chosen, outcome, items), items


def _metrics(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Metric and filter of each score, from keys such as `acc,none`."""
    for key in found:
        metric, comma, chosen = key.rpartition(",")
        if comma and not metric.endswith("_stderr"):
            yield metric, chosen


def _row(loaded: Loaded, name: str, metric: str, chosen: str, outcome: Outcome, items: Items | None) -> dict[str, Any]:
    found, results = outcome.results["results"][name], outcome.results
    error = found.get(f"{metric}_stderr,{chosen}", "N/A")
    if error == "N/A":  # the harness has no formula for ratios of sums
        error = items.standard_error() if items is not None else math.nan
    better = results["higher_is_better"].get(name, {}).get(metric)
    return {
        "name": loaded.benchmark.name if loaded.benchmark.metric else name,
        "task": name,
        "metric": metric,
        "filter": chosen,
        "shots": results["n-shot"].get(name),
        "score": float(found[f"{metric},{chosen}"]),
        "standard_error": None if math.isnan(error) else float(error),
        "items": int(found["sample_len"]),
        "items_cut": sum(outcome.cut.get(task.task_name, 0) for task in loaded.members),
        "higher_is_better": better is not False,
    }


def average(rows: Sequence[dict[str, Any]]) -> dict[str, float | None] | None:
    """The mean over benchmarks, as the papers give it; None where lower is better for one of them."""
    if len(rows) < 2 or not all(row["higher_is_better"] for row in rows):
        return None
    errors = [row["standard_error"] for row in rows]
    return {
        "score": math.fsum(row["score"] for row in rows) / len(rows),
        "standard_error": None if None in errors else math.hypot(*errors) / len(rows),
    }
