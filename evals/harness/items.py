"""What each item of a task contributes to a score, and how sure a mean over items is.

A score is a ratio: the items' values, summed, over their weights, summed. For accuracies every weight is one; for a
perplexity the values are negative log likelihoods, the weights words or bytes, and the score is the exponential.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from .tasks import Loaded

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Items:
    """One metric of one model, item by item."""

    values: list[float]
    weights: list[float]
    exponential: bool
    """Whether the score is the exponential of the ratio."""

    @property
    def binary(self) -> bool:
        """Whether each item is right or wrong."""
        return not self.exponential and all(value in (0, weight) for value, weight in self._pairs())

    def standard_error(self) -> float:
        """Of the score."""
        error = ratio_error(self.values, self.weights)
        return math.exp(ratio(self.values, self.weights)) * error if self.exponential else error

    def _pairs(self) -> list[tuple[float, float]]:
        return list(zip(self.values, self.weights, strict=True))


def items_of(loaded: Loaded, results: dict[str, Any], metric: str, chosen: str) -> Items | None:
    """The items behind a score; None where the score is no mean over items."""
    pieces = [_task_items(task, results["samples"][task.task_name], metric, chosen) for task in loaded.members]
    found = [piece for piece in pieces if piece is not None]
    if len(found) < len(pieces) or len({piece.exponential for piece in found}) > 1:
        return None
    by_size = _weighs_by_size(loaded, metric)
    values, weights = [], []
    for piece in found:
        share = 1.0 if by_size else 1 / len(piece.values)
        values += [share * value for value in piece.values]
        weights += [share * weight for weight in piece.weights]
    return Items(values, weights, found[0].exponential)


def _weighs_by_size(loaded: Loaded, metric: str) -> bool:
    """Whether a group's score is the mean over items, not over tasks."""
    if not loaded.is_group:
        return True
    return all(each.weight_by_size for each in loaded.task.aggregate_metric_list if each.metric == metric)


def _task_items(task: Any, samples: Sequence[dict[str, Any]], metric: str, chosen: str) -> Items | None:
    from lm_eval.api.metrics import bits_per_byte, mean, perplexity, weighted_perplexity

    scores = [sample[metric] for sample in samples if sample["filter"] == chosen]
    kind = task.aggregation().get(metric, mean)  # as the harness does
    if kind is mean:
        return Items([float(score) for score in scores], [1.0] * len(scores), False)
    if kind is perplexity:
        return Items([-float(score) for score in scores], [1.0] * len(scores), True)
    if kind not in (weighted_perplexity, bits_per_byte):
        return None
    unit = math.log(2) if kind is bits_per_byte else 1.0
    weights = [float(weight) for _, weight in scores]
    return Items([-float(score) / unit for score, _ in scores], weights, kind is weighted_perplexity)


def ratio(values: Sequence[float], weights: Sequence[float]) -> float:
    """The mean, where all weights are one."""
    return math.fsum(values) / math.fsum(weights)


def ratio_error(values: Sequence[float], weights: Sequence[float]) -> float:
    """The standard error of a ratio of sums over independent items; that of the mean, where all weights are one."""
    count, estimate = len(values), ratio(values, weights)
    if count < 2:
        return math.nan
    squares = math.fsum((value - estimate * weight) ** 2 for value, weight in zip(values, weights, strict=True))
    return math.sqrt(squares * count / (count - 1)) / math.fsum(weights)


@cache
def t_quantile(count: int) -> float:
    """How many standard errors, estimated from so many items, the interval reaches to each side."""
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, count - 1))
