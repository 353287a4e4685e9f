"""The allowed difference of a conversion from its source: none but rounding, approximate, or any."""

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
"""Mechanism -> whether it approximates the source with these settings."""
EXACT: dict[str, Callable[[Settings], bool]] = {
    "differential": lambda settings: settings["version"] == 2 or (settings["half_values"] and not settings["norm"]),
    "bilinear": lambda settings: True,
}
"""Mechanism -> whether a conversion with these settings gives the source's outputs, but a new model does not."""


@dataclass(frozen=True)
class Tolerance:
    """The maximum difference of a model from its source."""

    logits: float | None
    """Maximum difference of logits (of hidden states of encoders), relative to the largest; None for any."""
    divergence: float
    """KL divergence in nats, mean over positions."""


SAME = Tolerance(1e-5, 1e-5)
"""For the same arithmetic."""
ROUNDING = {
    "F64": Tolerance(1e-4, 1e-5),
    "F32": Tolerance(1e-4, 1e-5),
    "F16": Tolerance(2e-2, 1e-2),
    "BF16": Tolerance(1e-1, 1e-2),
}
"""For additional rounding to a dtype; the coarsest last."""


def starts_neutral(config: Any, allow_inexact: bool) -> bool:
    """Whether every mechanism starts neutral; `ConversionError` if one is not even approximate, unless allowed."""
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
    """The tolerance of a result that should equal its source, given the dtypes to which values are rounded."""
    dtypes = set(rounded_to)
    if not dtypes:
        return SAME
    coarsest = ROUNDING[max(dtypes, key=list(ROUNDING).index)]
    # Rounding may route a token to another expert, which changes its logits by any amount.
    return replace(coarsest, logits=None) if family_of(config).experts else coarsest


def recorded_tolerance(record: Mapping[str, Any]) -> Tolerance:
    """The tolerance in a model's own record, which allows no more than the coarsest of this crosshead."""
    coarsest, recorded = ROUNDING["BF16"], Tolerance(**record)
    logits = recorded.logits if recorded.logits is None else min(recorded.logits, coarsest.logits or inf)
    return Tolerance(logits, min(recorded.divergence, coarsest.divergence))


def check_equal(measured: Mapping[str, Any], limit: Tolerance | None) -> None:
    """`ConversionError` if the measured differences exceed the tolerance."""
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
