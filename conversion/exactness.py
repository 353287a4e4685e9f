"""How near a conversion starts to its source: equal, approximate by design, or neither."""

from collections.abc import Callable
from typing import Any

from crosshead.modeling.mechanisms import MECHANISMS
from crosshead.modeling.mixer import Settings
from crosshead.modeling.settings import shared_layout

from .created import layer_components
from .errors import ConversionError

APPROXIMATE: dict[str, Callable[[Settings], bool]] = {
    "explicit": lambda settings: not settings["norm"],  # component heads, fitted
    "mixture": lambda settings: settings["gate_scale"] == "unit" or settings["gate"] == "binary",
}
"""Mechanisms that a conversion starts as near to the source as it can, where their settings allow it."""
NEUTRAL_TOLERANCE = 1e-5
ROUNDING = {"F64": 1e-5, "F32": 1e-4, "F16": 2e-2, "BF16": 1e-1}
"""Greatest difference of logits, as a part of the greatest logit, that rounding weights to a dtype may make."""


def starts_neutral(config: Any, allow_inexact: bool) -> bool:
    """Whether every mechanism starts neutral; `ConversionError` where one starts nowhere near, unless allowed."""
    neutral = True
    for layer, layout in enumerate(config.layouts()):
        settings = config.mixers_of_layer(layer)
        shared = shared_layout(settings, layout)
        for name, options in settings.items():
            if MECHANISMS[name].starts_neutral(options, shared):
                continue
            neutral = False
            if not allow_inexact and not APPROXIMATE.get(name, lambda options: False)(options):
                raise ConversionError(
                    f"{name!r} with these options does not start as the source, so the model would forget what it "
                    "knows: choose others, or accept that with --allow-inexact"
                )
    return neutral


def tolerance(neutral: bool, rounded_to: str | None) -> float | None:
    """How far the logits may be from the source's, as a part of the greatest; None where any distance may be right."""
    if not neutral:
        return None
    return NEUTRAL_TOLERANCE if rounded_to is None else ROUNDING[rounded_to]


def cache_bytes(config: Any, itemsize: int) -> int:
    """Bytes of key/value cache for each token."""
    total = 0
    for layer, layout in enumerate(config.layouts()):
        components, beside = layer_components(config, layer)
        total += (sum(components.values()) * layout.head_dim + beside) * itemsize
    return total
