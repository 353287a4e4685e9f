"""Computes scores of a model with the items behind them, and compares two models on the same items.

A score is a ratio: the sum of the items' values over the sum of their weights. For an accuracy, every weight is one.
For a perplexity, the values are negative log-likelihoods, the weights are words or bytes, and the score is the
exponential of the ratio. Differences are taken item by item, because an item is hard or easy for both models: this is
much more precise than the difference of two scores.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from crosshead.common.errors import EvalError

from .tasks import LoadedBenchmark

CONFIDENCE = 0.95
MAXIMUM_LOG = 700.0
"""Largest exponent in the change of a perplexity: exp of larger ones is infinite, which JSON cannot express."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Items:
    """One metric of one model: a value and a weight per item."""

    values: list[float]
    weights: list[float]
    exponential: bool
    """True if the score is the exponential of the ratio, as for a perplexity."""
    answers: list[float] | None = None
    """The model's answers per item, for a score whose values depend on the other items, such as a correlation."""

    @property
    def binary(self) -> bool:
        """True if every item is either right or wrong."""
        pairs = zip(self.values, self.weights, strict=True)
        return not self.exponential and self.answers is None and all(value in (0, weight) for value, weight in pairs)

    def standard_error(self) -> float:
        """Return the standard error of the score."""
        error = ratio_error(self.values, self.weights)
        return math.exp(ratio(self.values, self.weights)) * error if self.exponential else error


def score_rows(benchmarks: Sequence[LoadedBenchmark], results: dict[str, Any]) -> list[tuple[Row, Items | None]]:
    """Return a row per benchmark, or per metric if the benchmark names none, and the items behind the row."""
    rows = []
    for loaded in benchmarks:
        for metric, filter_name in _metrics(loaded, results["results"][loaded.name]):
            items = items_of(loaded, results["samples"], metric, filter_name)
            rows.append((_row(loaded, metric, filter_name, results, items), items))
    return rows


def _metrics(loaded: LoadedBenchmark, scores: dict[str, Any]) -> list[tuple[str, str]]:
    """Return metric and filter of each row; the keys of `scores` are such as `acc,none` and `acc_stderr,none`."""
    keys = (key.rpartition(",") for key in scores)
    known = [(metric, name) for metric, comma, name in keys if comma and not metric.endswith("_stderr")]
    requested = loaded.benchmark.metric, loaded.benchmark.filter
    if requested[0] is None:
        return known
    if requested not in known:
        raise EvalError(
            f"the task {loaded.name} has no score {requested[0]},{requested[1]} in the installed lm_eval: it has "
            f"{' and '.join(map(','.join, known))}"
        )
    return [(requested[0], requested[1])]


def _row(loaded: LoadedBenchmark, metric: str, filter_name: str, results: dict[str, Any], items: Items | None) -> Row:
    name = loaded.name
    scores = results["results"][name]
    error = scores.get(f"{metric}_stderr,{filter_name}", "N/A")
    if error == "N/A":  # the harness has no formula for ratios of sums
        error = items.standard_error() if items is not None else math.nan
    members = [task.task_name for task in loaded.members]  # the harness reports no shots for groups of groups
    shots = {results["n-shot"].get(member) for member in members}
    return {
        "name": loaded.benchmark.name if loaded.benchmark.metric else name,
        "task": name,
        "metric": metric,
        "filter": filter_name,
        "shots": shots.pop() if len(shots) == 1 else None,
        "score": float(scores[f"{metric},{filter_name}"]),
        "standard_error": None if math.isnan(error) else float(error),
        "items": int(scores["sample_len"]) if items is None else len(items.values),
        "items_cut": sum(results["truncated"][member] for member in members),
        "higher_is_better": False not in (results["higher_is_better"][member].get(metric) for member in members),
    }


def items_of(loaded: LoadedBenchmark, samples: dict[str, Any], metric: str, filter_name: str) -> Items | None:
    """Return the items behind a score; None if the score is not a mean over items."""
    by_task = [_task_items(task, samples[task.task_name], metric, filter_name) for task in loaded.members]
    present = [items for items in by_task if items is None or items.values]  # a task may lack a metric of its group
    if not loaded.is_group:
        return present[0]
    aggregations = loaded.task.aggregate_metric_list
    by_size = all(aggregation.weight_by_size for aggregation in aggregations if aggregation.metric == metric)
    values, weights = [], []
    for items in present:  # a mean over tasks, weighted by size or not; a mean of perplexities is no ratio of sums
        if items is None or items.exponential:
            return None
        share = (len(items.values) if by_size else 1) / math.fsum(items.weights)
        values += [share * value for value in items.values]
        weights += [share * weight for weight in items.weights]
    return Items(values, weights, False)


def _task_items(task: Any, samples: Sequence[dict[str, Any]], metric: str, filter_name: str) -> Items | None:
    from lm_eval.api.metrics import bits_per_byte, mean, perplexity, weighted_perplexity

    scores = [sample[metric] for sample in samples if sample["filter"] == filter_name and metric in sample]
    aggregation = task.aggregation().get(metric, mean)  # the harness's default
    if aggregation is mean:
        return Items([float(score) for score in scores], [1.0] * len(scores), False)
    if aggregation is perplexity:
        return Items([-float(score) for score in scores], [1.0] * len(scores), True)
    if aggregation not in (weighted_perplexity, bits_per_byte):
        return None
    unit = math.log(2) if aggregation is bits_per_byte else 1.0
    weights = [float(weight) for _, weight in scores]
    return Items([-float(score) / unit for score, _ in scores], weights, aggregation is weighted_perplexity)


def average(rows: Sequence[Row]) -> dict[str, float | None] | None:
    """Return the mean over benchmarks, as in the papers; None for one benchmark, or if lower is better for any."""
    if len(rows) < 2 or not all(row["higher_is_better"] for row in rows):
        return None
    errors = [row["standard_error"] for row in rows]
    return {
        "score": math.fsum(row["score"] for row in rows) / len(rows),
        "standard_error": None if None in errors else math.hypot(*errors) / len(rows),
    }


def compare(
    rows: Sequence[Row], first: Sequence[Items | None], second: Sequence[Items | None]
) -> dict[str, list[Row]]:
    """Return the changes from the first model to the second; rows that are no mean over items are in `left_out`."""
    scores, left_out = [], []
    for row, before, after in zip(rows, first, second, strict=True):
        names = {key: row[key] for key in ("name", "task", "metric", "filter")}
        if before is None or after is None:
            left_out.append(names)
        else:
            scores.append(names | difference(before, after, row["higher_is_better"]))
    return {"scores": scores, "left_out": left_out}


def difference(first: Items, second: Items, higher_is_better: bool) -> Row:
    """Return the change of one score: relative to the first model for a perplexity, otherwise the difference."""
    changes = [after - before for before, after in zip(first.values, second.values, strict=True)]
    change = ratio(changes, first.weights)
    bounds = interval(changes, first.weights, first.binary and second.binary)
    if first.exponential:
        change, *bounds = (math.expm1(min(value, MAXIMUM_LOG)) for value in (change, *bounds))
    answers = zip(first.answers or first.values, second.answers or second.values, strict=True)
    differing = sum(before != after for before, after in answers)
    return {
        "scale": "part of the first" if first.exponential else "difference",
        "change": change,
        "interval": list(bounds) or None,
        "verdict": _verdict(bounds, higher_is_better) if differing else "equal",
        "items": len(changes),
        "items_that_differ": differing,
    }


def _verdict(bounds: Sequence[float], higher_is_better: bool) -> str:
    if not bounds or bounds[0] <= 0 <= bounds[1]:
        return "unclear"
    return "better" if (bounds[0] > 0) == higher_is_better else "worse"


def interval(changes: Sequence[float], weights: Sequence[float], binary: bool) -> list[float]:
    """Return the bounds of the confidence interval of the mean change; empty for one item.

    If each item is right or wrong (`binary`), two items are added (Bonett and Price 2012): one that only the first
    model gets right, and one that only the second gets right. Without them, a few equal items would seem to prove that
    there is no difference.
    """
    if binary:
        share = math.fsum(weights) / len(weights)
        changes, weights = [*changes, share, -share], [*weights, share, share]
    if len(changes) < 2:
        return []
    middle, half_width = ratio(changes, weights), t_quantile(len(changes)) * ratio_error(changes, weights)
    return [middle - half_width, middle + half_width]


def ratio(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the ratio of the sums; the mean of the values if all weights are one."""
    return math.fsum(values) / math.fsum(weights)


def ratio_error(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the standard error of a ratio of sums over independent items."""
    count, estimate = len(values), ratio(values, weights)
    if count < 2:
        return math.nan
    squares = math.fsum((value - estimate * weight) ** 2 for value, weight in zip(values, weights, strict=True))
    return math.sqrt(squares * count / (count - 1)) / math.fsum(weights)


@cache
def t_quantile(count: int) -> float:
    """Return the half-width of the confidence interval of a mean over `count` items, in standard errors."""
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, count - 1))
