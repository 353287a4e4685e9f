"""Conversions that encoders, and decoders with MLA, do not support, and the reasons."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from crosshead.common.errors import ConversionError

from ..mixers import MixerRequest
from ..options import Options
from .families import family_of


@dataclass(frozen=True)
class RequestedConversion:
    """The source's config, and the requested mechanisms and options."""

    stock: Any
    mixers: MixerRequest
    options: Options
    statistics: set[str] = field(default_factory=set)
    """Kinds of statistics that the conversion needs ("statistics", "use", "router"), once they are known."""


@dataclass(frozen=True)
class Limit:
    """An unsupported conversion, with its name and the reason for the error message."""

    conversion: str
    reason: str
    applies: Callable[[RequestedConversion], bool]
    """True if a requested conversion is this unsupported one."""


LIMITS = (
    Limit(
        "--cache, --active and --layers auto",
        "they measure the loss of a causal language model: choose layers and heads yourself",
        lambda request: (request.options.budget, request.options.active) != (None, None),
    ),
    Limit(
        "explicit with fewer heads and method=aligned",
        "its fit follows causal attention with RoPE: use explicit:method=svd",
        lambda request: "statistics" in request.statistics,
    ),
    Limit(
        "mixture with shared=calibrated",
        "the use of heads is observed in causal attention: omit the option",
        lambda request: "use" in request.statistics,
    ),
    Limit(
        "mixture with fewer heads and method=calibrated in ALBERT",
        "one router serves all layers, and no fit to a single layer suits it: use method=paper, and train",
        lambda request: "router" in request.statistics and hasattr(request.stock, "num_hidden_groups"),
    ),
    Limit(
        "differential with half_values",
        "the conversion doubles the heads, and the size of a head follows from their number: use another mechanism",
        lambda request: any(part.mixers.get("differential", {}).get("half_values") for part in request.mixers.by_part),
    ),
    Limit(
        "differential with version=2",
        "it pairs query heads over one key/value head, and each query head has its own",
        lambda request: any(
            part.mixers.get("differential", {}).get("version") == 2 for part in request.mixers.by_part
        ),
    ),
    Limit(
        "bilinear",
        "its matrices are products of projections without biases, which a T5 has: train it from scratch",
        lambda request: "bilinear" in request.mixers.mixers and not family_of(request.stock).stacks,
    ),
    Limit(
        "--vocab-size of vision transformers",
        "they have no vocabulary: omit the option",
        lambda request: request.options.vocab_size is not None and family_of(request.stock).reads_images,
    ),
)
"""Limits of encoders, in the order in which they are checked."""
LATENT_LIMITS = (
    Limit(
        "--cache and --layers auto",
        "keys and values are expanded from one latent vector: there are no KV heads to combine",
        lambda request: request.options.budget is not None,
    ),
    Limit(
        "mixture with shared=calibrated",
        "the projections that would be reordered hold keys and values together: omit the option",
        lambda request: "use" in request.statistics,
    ),
)
"""Limits of decoders with MLA."""


def check_limits(request: RequestedConversion) -> None:
    """Raise `ConversionError` if the model does not support the conversion."""
    family = family_of(request.stock)
    for limit in LIMITS if family.is_encoder else LATENT_LIMITS if family.latent else ():
        if limit.applies(request):
            raise ConversionError(f"{limit.conversion}: not for {request.stock.model_type} models; {limit.reason}")
