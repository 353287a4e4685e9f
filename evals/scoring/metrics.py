"""Computes metrics with the items behind them, so that two models can be compared item by item.

F1 and correlations are not means over items. Their items are jackknife values: the mean of these values is the score,
and their standard error is the jackknife's standard error of the score.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..harness.scores import Items, ratio

TOP = 5
"""Number of likeliest classes in top-5 accuracy."""


@dataclass(frozen=True)
class Score:
    """One metric of one model, and the items behind it."""

    metric: str
    items: Items
    higher_is_better: bool = True

    @property
    def value(self) -> float:
        """The score: the ratio of the items' sums, or its exponential."""
        value = ratio(self.items.values, self.items.weights)
        return math.exp(value) if self.items.exponential else value


def _means(values: Tensor) -> Items:
    return Items(values.tolist(), [1.0] * len(values), False)


def class_scores(losses: Tensor, predictions: Tensor, labels: Tensor, classes: int) -> list[Score]:
    """Return accuracy, F1, Matthews correlation and loss; F1 of class 1 if there are two classes, else macro F1."""
    scores = [Score("accuracy", _means((predictions == labels).double()))]
    for name, metric in (("f1" if classes == 2 else "macro_f1", _f1), ("matthews_correlation", _matthews)):
        scores.append(Score(name, _confusion_items(metric, predictions, labels, classes)))
    return [*scores, Score("loss", _means(losses), False)]


def image_scores(losses: Tensor, predictions: Tensor, labels: Tensor, among_top: Tensor) -> list[Score]:
    """Return accuracy, top-5 accuracy and loss; `among_top` is 1 if the label is among the `TOP` likeliest."""
    accuracy, loss = Score("accuracy", _means((predictions == labels).double())), Score("loss", _means(losses), False)
    return [accuracy, Score(f"top_{TOP}_accuracy", _means(among_top)), loss]


def token_scores(losses: Tensor, hits: Tensor, tokens: Tensor) -> list[Score]:
    """Return loss, perplexity and accuracy of tokens, from the sums over the tokens of each window."""
    sums, weights = losses.tolist(), tokens.double().tolist()
    return [
        Score("loss", Items(sums, weights, False), False),
        Score("perplexity", Items(sums, weights, True), False),
        Score("accuracy", Items(hits.tolist(), weights, False)),
    ]


def value_scores(predictions: Tensor, labels: Tensor) -> list[Score]:
    """Return Pearson and Spearman correlation with jackknife values, from the correlations without one item each."""
    from scipy.stats import rankdata

    scores, indices = [], np.arange(len(labels))
    for name, transform in (("pearson", np.asarray), ("spearman", rankdata)):

        def score(selection: Any, transform: Callable[[Any], Any] = transform) -> float:
            return _correlation(transform(predictions.numpy()[selection]), transform(labels.numpy()[selection]))

        without = torch.tensor([score(indices != left_out) for left_out in indices], dtype=torch.float64)
        scores.append(Score(name, _jackknife(score(slice(None)), without, predictions)))
    return scores


def _correlation(x: Any, y: Any) -> float:
    """Return Pearson's correlation; 0 if one side is constant."""
    return float(np.corrcoef(x, y)[0, 1]) if np.ptp(x) and np.ptp(y) else 0.0


def _jackknife(score: float, without: Tensor, answers: Tensor) -> Items:
    """Return the jackknife values of a score; `without[i]` is the score of all items but item i."""
    values = score + (len(without) - 1) * (without.mean() - without)
    return Items(values.tolist(), [1.0] * len(values), False, answers.tolist())


def _confusion_items(metric: Callable[[Tensor], float], predictions: Tensor, labels: Tensor, classes: int) -> Items:
    """Return the jackknife values of a metric of the confusion matrix (rows: labels, columns: predictions)."""
    cells = labels * classes + predictions
    counts = torch.bincount(cells, minlength=classes**2).double()
    without = torch.zeros_like(counts)
    for cell in counts.nonzero():
        fewer = counts.clone()
        fewer[cell] -= 1
        without[cell] = metric(fewer.view(classes, classes))
    return _jackknife(metric(counts.view(classes, classes)), without[cells], predictions)


def _f1(confusion: Tensor) -> float:
    """Return the F1 of class 1 for two classes; for more, the mean F1 of the classes that occur."""
    totals = confusion.sum(0) + confusion.sum(1)
    by_class = 2 * confusion.diagonal() / totals.clamp(min=1)
    if len(confusion) == 2:
        return float(by_class[1])
    return float(by_class.sum() / (totals > 0).sum().clamp(min=1))


def _matthews(confusion: Tensor) -> float:
    """Return the Matthews correlation; 0 if the labels or the predictions are all equal."""
    predicted, labelled, count = confusion.sum(0), confusion.sum(1), confusion.sum()
    spread = (count**2 - predicted @ predicted) * (count**2 - labelled @ labelled)
    covariance = confusion.diagonal().sum() * count - predicted @ labelled
    return float(covariance / spread.sqrt()) if spread > 0 else 0.0
