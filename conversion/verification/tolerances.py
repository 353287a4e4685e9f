"""How much a conversion may differ from its source at the start: not at all, approximately, or by any amount."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from crosshead.common.errors import ConversionError
from crosshead.modeling.configuration import shared_layout
from crosshead.modeling.mechanisms import RULES
from crosshead.modeling.mechanisms.base import Settings

from ..architectures.families import family_of
from ..architectures.mixer_tensors import layer_components

APPROXIMATE: dict[str, Callable[[Settings], bool]] = {
    "explicit": lambda settings: not settings["norm"],  # component heads, fitted
    "mixture": lambda settings: settings["gate_scale"] == "unit" or settings["gate"] == "binary",
}
"""Mechanisms that a conversion starts as near to the source as it can, where their settings allow it."""


@dataclass(frozen=True)
class Tolerance:
    """How far a model may be from the one that it ought to equal."""

    logits: float | None
    """Greatest difference, as a part of the greatest logit. None: it says nothing."""
    divergence: float
    """KL divergence in nats, mean over positions."""


SAME = Tolerance(1e-5, 1e-5)
"""Where the arithmetic is the same."""
ROUNDING = {
    "F64": Tolerance(1e-4, 1e-5),
    "F32": Tolerance(1e-4, 1e-5),
    "F16": Tolerance(2e-2, 1e-2),
    "BF16": Tolerance(1e-1, 1e-2),
}
"""Where numbers are rounded to a dtype once more; the coarsest last."""


def starts_neutral(config: Any, allow_inexact: bool) -> bool:
    """Whether every mechanism starts neutral; `ConversionError` where one starts nowhere near, unless allowed."""
    neutral = True
    for layer, layout in enumerate(config.layouts()):
        settings = config.mixers_of_layer(layer)
        shared = shared_layout(settings, layout)
        for name, options in settings.items():
            if RULES[name].starts_neutral(options, shared):
                continue
            neutral = False
            if not allow_inexact and not APPROXIMATE.get(name, lambda options: False)(options):
                raise ConversionError(
                    f"{name!r} with these options does not start as the source, so the model would forget what it "
                    "knows: choose others, or accept that with --allow-inexact"
                )
    return neutral


def tolerance(config: Any, rounded_to: Iterable[str]) -> Tolerance:
    """How far a result that ought to equal its source may be from it, given the dtypes that numbers are rounded to."""
    dtypes = set(rounded_to)
    if not dtypes:
        return SAME
    found = ROUNDING[max(dtypes, key=list(ROUNDING).index)]
    # Rounding may send a token to another expert, which changes its logits by any amount.
    return replace(found, logits=None) if family_of(config).experts else found


def cache_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of key/value cache for each token, with weights of a dtype."""
    total = 0
    for layer, layout in enumerate(config.layouts()):
        components, beside = layer_components(config, layer, dtype)
        total += (sum(components.values()) * layout.head_dim + beside) * dtype.itemsize
    return total
