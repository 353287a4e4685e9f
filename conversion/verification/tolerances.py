"""The allowed difference between a converted model and its source."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from crosshead.common.errors import ConversionError
from crosshead.modeling.mechanisms import RULES
from crosshead.modeling.mechanisms.base import Settings

from ..architectures.attention_names import attention_layers
from ..architectures.families import family_of
from ..architectures.mixer_tensors import mixers_layout

APPROXIMATE: dict[str, Callable[[Settings], bool]] = {
    "explicit": lambda settings: not settings["norm"],  # component heads are fitted
    "mixture": lambda settings: settings["gate_scale"] == "unit" or settings["gate"] == "binary",
}
"""Mechanism -> function of its settings: True if a conversion with these settings approximates the source."""
EXACT: dict[str, Callable[[Settings], bool]] = {
    "differential": lambda settings: settings["version"] == 2 or (settings["half_values"] and not settings["norm"]),
    "bilinear": lambda settings: True,
}
"""Mechanism -> function of its settings: True if a conversion with these settings gives the source's outputs.

These settings are not neutral in a new model: the conversion makes them so.
"""


@dataclass(frozen=True)
class Tolerance:
    """The maximum allowed difference of a model from its source."""

    logits: float | None
    """Maximum difference of logits (hidden states of encoders), relative to the largest one; None allows any."""
    divergence: float
    """Maximum KL divergence in nats, mean over positions."""


SAME = Tolerance(1e-5, 1e-5)
"""Tolerance of a model that computes with the same arithmetic as its source."""
ROUNDING = {
    "F64": Tolerance(1e-4, 1e-5),
    "F32": Tolerance(1e-4, 1e-5),
    "F16": Tolerance(2e-2, 1e-2),
    "BF16": Tolerance(1e-1, 1e-2),
}
"""Tolerance of a model with values that are additionally rounded to a dtype; the coarsest dtype is the last."""


def starts_neutral(config: Any, allow_inexact: bool) -> bool:
    """True if a conversion to this config gives the source's outputs.

    `ConversionError` if a mechanism does not even approximate them, unless `allow_inexact`.
    """
    is_neutral = True
    for layer in attention_layers(config):
        layout = mixers_layout(config, layer)
        for name, options in config.mixers_of_layer(layer).items():
            if RULES[name].starts_neutral(options, layout) or (name in EXACT and EXACT[name](options)):
                continue
            is_neutral = False
            if not allow_inexact and not (name in APPROXIMATE and APPROXIMATE[name](options)):
                raise ConversionError(
                    f"{name!r} with these options does not start close to the source, so the model would be much "
                    "worse: use other options, or accept it with --allow-inexact"
                )
    return is_neutral


def tolerance(config: Any, rounded_to: Iterable[str]) -> Tolerance:
    """Return the tolerance of a result that should equal its source, for the dtypes to which values are rounded."""
    dtypes = set(rounded_to)
    if not dtypes:
        return SAME
    coarsest = ROUNDING[max(dtypes, key=list(ROUNDING).index)]
    # Rounding may route a token to another expert, which can change its logits by any amount.
    return replace(coarsest, logits=None) if family_of(config).experts else coarsest


def recorded_tolerance(record: Mapping[str, Any]) -> Tolerance:
    """Return the tolerance in a model's record, limited to the coarsest tolerance of this crosshead version."""
    coarsest, recorded = ROUNDING["BF16"], Tolerance(**record)
    logits = recorded.logits if recorded.logits is None else min(recorded.logits, coarsest.logits or inf)
    return Tolerance(logits, min(recorded.divergence, coarsest.divergence))


def check_equal(measured: Mapping[str, Any], limit: Tolerance | None) -> None:
    """Raise `ConversionError` if the measured differences exceed the tolerance."""
    if limit is None:
        return
    kind = "hidden" if "largest_hidden" in measured else "logit"
    difference, largest = measured[f"greatest_{kind}_difference"], measured[f"largest_{kind}"]
    divergence = measured.get("kl_divergence", 0.0)
    allowed = inf if limit.logits is None else limit.logits * largest
    if not (difference <= allowed and divergence <= limit.divergence):
        outputs = "hidden states" if kind == "hidden" else "logits"
        raise ConversionError(
            f"the result should equal its source, but {outputs} differ by up to {difference:.3g} (the largest is "
            f"{largest:.3g}), and the KL divergence is {divergence:.3g}; please report this"
        )
