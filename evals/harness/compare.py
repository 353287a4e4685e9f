"""The difference of two models on the same items, with a confidence interval.

Items are hard or easy for both models alike, so the difference item by item is much surer than two separate scores.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .items import Items, ratio, ratio_error, t_quantile

Row = Mapping[str, Any]
Found = Items | None
LARGEST_LOG = 700.0
"""The exponential of more would not be a finite number, and JSON has no other."""


def compare(rows: Sequence[Row], first: Sequence[Found], second: Sequence[Found]) -> dict[str, list[dict[str, Any]]]:
    """The second model minus the first, for every row whose score is a mean over items; and the other rows."""
    scores, left_out = [], []
    for row, one, other in zip(rows, first, second, strict=True):
        named = {key: row[key] for key in ("name", "task", "metric", "filter")}
        if one is None or other is None:
            left_out.append(named)
        else:
            scores.append(named | difference(one, other, row["higher_is_better"]))
    return {"scores": scores, "left_out": left_out}


def difference(first: Items, second: Items, higher_is_better: bool) -> dict[str, Any]:
    """One row: perplexities differ by a part of the first one's, other scores by their difference."""
    changes = [after - before for before, after in zip(first.values, second.values, strict=True)]
    change = ratio(changes, first.weights)
    bounds = interval(changes, first.weights, first.binary and second.binary)
    if first.exponential:
        change = _growth(change)
        bounds = None if bounds is None else (_growth(bounds[0]), _growth(bounds[1]))
    differ = sum(each != 0 for each in changes)
    return {
        "scale": "part of the first" if first.exponential else "difference",
        "change": change,
        "interval": None if bounds is None else list(bounds),
        "verdict": _verdict(bounds, higher_is_better) if differ else "equal",
        "items": len(changes),
        "items_that_differ": differ,
    }


def _growth(logarithm: float) -> float:
    return math.expm1(min(logarithm, LARGEST_LOG))


def _verdict(bounds: tuple[float, float] | None, higher_is_better: bool) -> str:
    if bounds is None or bounds[0] <= 0 <= bounds[1]:
        return "unclear"
    return "better" if (bounds[0] > 0) == higher_is_better else "worse"


def interval(changes: Sequence[float], weights: Sequence[float], binary: bool) -> tuple[float, float] | None:
    """Where the true change lies, for all items that these are a sample of; None for one item, which has no spread.

    Where each item is right or wrong, two are added (Bonett and Price 2012): one that only the first model gets right,
    and one that only the second does. Else a few items without a difference would seem to prove that there is none.
    """
    if binary:
        share = math.fsum(weights) / len(weights)
        changes, weights = [*changes, share, -share], [*weights, share, share]
    if len(changes) < 2:
        return None
    middle, reach = ratio(changes, weights), t_quantile(len(changes)) * ratio_error(changes, weights)
    return middle - reach, middle + reach
