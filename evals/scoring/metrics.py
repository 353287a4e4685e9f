"""Metrics with the items behind them, so that two models can be compared item by item.

F1 and correlations are not means over items. Their items are jackknife values: the mean of these is the score, and
their standard error is the jackknife's.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..harness.scores import Items, ratio

TOP = 5
SMALLEST = 1e-12
"""A variance below this part of the whole one is a rounding error."""
BLOCK = 1 << 22
"""The elements of a matrix of ranks that are computed at a time."""


@dataclass(frozen=True)
class Score:
    """One metric of one model."""

    metric: str
    items: Items
    higher_is_better: bool = True

    @property
    def value(self) -> float:
        """The score."""
        found = ratio(self.items.values, self.items.weights)
        return math.exp(found) if self.items.exponential else found


def _means(values: Tensor) -> Items:
    return Items(values.tolist(), [1.0] * len(values), False)


def class_scores(losses: Tensor, predictions: Tensor, labels: Tensor, classes: int) -> list[Score]:
    """Accuracy, F1, Matthews correlation and loss; F1 is that of class 1, or for more classes the mean over them."""
    scores = [Score("accuracy", _means((predictions == labels).double()))]
    for name, metric in (("f1" if classes == 2 else "macro_f1", _f1), ("matthews_correlation", _matthews)):
        scores.append(Score(name, _of_confusion(metric, predictions, labels, classes)))
    return [*scores, Score("loss", _means(losses), False)]


def image_scores(losses: Tensor, predictions: Tensor, labels: Tensor, among_top: Tensor) -> list[Score]:
    """Accuracy, top-5 accuracy and loss; `among_top` is 1 for an item with its class among the `TOP` likeliest."""
    accuracy, loss = Score("accuracy", _means((predictions == labels).double())), Score("loss", _means(losses), False)
    return [accuracy, Score(f"top_{TOP}_accuracy", _means(among_top)), loss]


def token_scores(losses: Tensor, hits: Tensor, tokens: Tensor) -> list[Score]:
    """Loss, perplexity and accuracy of tokens, from the sums over the tokens of each window."""
    sums, weights = losses.tolist(), tokens.double().tolist()
    return [
        Score("loss", Items(sums, weights, False), False),
        Score("perplexity", Items(sums, weights, True), False),
        Score("accuracy", Items(hits.tolist(), weights, False)),
    ]


def value_scores(predictions: Tensor, labels: Tensor) -> list[Score]:
    """Pearson's and Spearman's correlation; a model whose predictions are all equal has 0."""
    found = []
    ranks = (_ranks(predictions), _ranks(labels))
    for name, pair, without in (
        ("pearson", (predictions, labels), _pearson_without(predictions, labels)),
        ("spearman", ranks, _spearman_without(predictions, labels)),
    ):
        score = float(_correlation(*(each - each.mean() for each in pair)))
        found.append(Score(name, _jackknife(score, without, predictions)))
    return found


def _jackknife(score: float, without: Tensor, answers: Tensor) -> Items:
    """`without` holds the score of all items but one, for each."""
    values = score + (len(without) - 1) * (without.mean() - without)
    return Items(values.tolist(), [1.0] * len(values), False, answers.tolist())


def _of_confusion(metric: Callable[[Tensor], float], predictions: Tensor, labels: Tensor, classes: int) -> Items:
    """A score of the matrix of counts, with a row for each label and a column for each prediction."""
    cells = labels * classes + predictions
    counts = torch.bincount(cells, minlength=classes**2).double()
    without = torch.zeros_like(counts)
    for cell in counts.nonzero():
        fewer = counts.clone()
        fewer[cell] -= 1
        without[cell] = metric(fewer.view(classes, classes))
    return _jackknife(metric(counts.view(classes, classes)), without[cells], predictions)


def _f1(confusion: Tensor) -> float:
    """Of class 1 among two; the mean over the classes that occur among more."""
    totals = confusion.sum(0) + confusion.sum(1)
    by_class = 2 * confusion.diagonal() / totals.clamp(min=1)
    if len(confusion) == 2:
        return float(by_class[1])
    return float(by_class.sum() / (totals > 0).sum().clamp(min=1))


def _matthews(confusion: Tensor) -> float:
    """0 if the labels or the predictions are all equal."""
    predicted, labelled, count = confusion.sum(0), confusion.sum(1), confusion.sum()
    spread = (count**2 - predicted @ predicted) * (count**2 - labelled @ labelled)
    covariance = confusion.diagonal().sum() * count - predicted @ labelled
    return float(covariance / spread.sqrt()) if spread > 0 else 0.0


def _correlation(x: Tensor, y: Tensor) -> Tensor:
    """The correlation over the last dimension of values whose mean is 0."""
    return _quotient((x * y).sum(-1), x.square().sum(-1), y.square().sum(-1))


def _quotient(covariance: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """A correlation from sums of products; 0 where one side does not vary."""
    spread = (x * y).sqrt()
    return torch.where(spread > 0, covariance / spread, 0.0).clamp(-1, 1)


def _pearson_without(x: Tensor, y: Tensor) -> Tensor:
    """The correlation of all items but one, for each."""
    x, y, part = x - x.mean(), y - y.mean(), len(x) / (len(x) - 1)

    def sums(one: Tensor, other: Tensor) -> Tensor:
        return (one @ other) - part * one * other

    def squares(values: Tensor) -> Tensor:
        found = sums(values, values)
        return torch.where(found > SMALLEST * (values @ values), found, 0.0)

    return _quotient(sums(x, y), squares(x), squares(y))


def _ranks(values: Tensor) -> Tensor:
    """Ranks from 1 on; equal values share the mean of theirs."""
    _, place, counts = values.unique(return_inverse=True, return_counts=True)
    return counts.cumsum(0)[place] - (counts[place] - 1).double() / 2


def _spearman_without(x: Tensor, y: Tensor) -> Tensor:
    """The rank correlation of all items but one, for each."""
    ranks, count = (_ranks(x), _ranks(y)), len(x)
    found = []
    for rows in torch.arange(count).split(max(1, BLOCK // count)):
        sides = []
        for values, whole in zip((x, y), ranks, strict=True):
            left_out = values[rows, None]
            fewer = whole - (left_out < values).double() - (left_out == values) / 2 - count / 2
            fewer[torch.arange(len(rows)), rows] = 0  # the mean of the others is count / 2
            sides.append(fewer)
        found.append(_correlation(*sides))
    return torch.cat(found)
