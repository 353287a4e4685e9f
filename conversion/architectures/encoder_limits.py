"""The conversions that encoders, and decoders with MLA, do not support, with the reasons."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from crosshead.common.errors import ConversionError

from ..options import MixerRequest, Options
from .families import family_of


@dataclass(frozen=True)
class Asked:
    """The source's configuration, and the requested mechanisms and options."""

    stock: Any
    mixers: MixerRequest
    given: Options
    observations: set[str] = field(default_factory=set)
    """The kinds of statistics that the conversion needs, once they are known."""


@dataclass(frozen=True)
class Limit:
    """A conversion that is refused."""

    what: str
    reason: str
    applies: Callable[[Asked], bool]


LIMITS = (
    Limit(
        "--cache, --active and --layers auto",
        "they measure the loss of a causal language model: choose layers and heads yourself",
        lambda asked: (asked.given.budget, asked.given.active) != (None, None),
    ),
    Limit(
        "explicit with fewer heads and method=aligned",
        "its fit follows causal attention with RoPE: use explicit:method=svd",
        lambda asked: "statistics" in asked.observations,
    ),
    Limit(
        "mixture with shared=calibrated",
        "the use of heads is observed in causal attention: omit the option",
        lambda asked: "use" in asked.observations,
    ),
    Limit(
        "mixture with fewer heads and method=calibrated in ALBERT",
        "one router serves all layers, and no fit to a single layer suits it: use method=paper, and train",
        lambda asked: "router" in asked.observations and hasattr(asked.stock, "num_hidden_groups"),
    ),
    Limit(
        "differential with half_values",
        "the conversion doubles the heads, and the size of a head follows from their number: use another mechanism",
        lambda asked: any(each.mixers.get("differential", {}).get("half_values") for each in asked.mixers.by_part),
    ),
    Limit(
        "bilinear",
        "its matrices are products of projections without biases, which a T5 has: train it from scratch",
        lambda asked: "bilinear" in asked.mixers.mixers and not family_of(asked.stock).stacks,
    ),
    Limit(
        "--vocab-size of vision transformers",
        "they have no vocabulary: omit the option",
        lambda asked: asked.given.vocab_size is not None and family_of(asked.stock).reads_images,
    ),
)
"""Of encoders, in the order in which they are checked."""
LATENT_LIMITS = (
    Limit(
        "--cache and --layers auto",
        "keys and values are expanded from one latent vector: there are no KV heads to combine",
        lambda asked: asked.given.budget is not None,
    ),
    Limit(
        "mixture with shared=calibrated",
        "the projections that would be reordered hold keys and values together: omit the option",
        lambda asked: "use" in asked.observations,
    ),
)
"""Of decoders with MLA."""


def check_limits(asked: Asked) -> None:
    """`ConversionError` if the model does not support the conversion."""
    family = family_of(asked.stock)
    for limit in LIMITS if family.is_encoder else LATENT_LIMITS if family.latent else ():
        if limit.applies(asked):
            raise ConversionError(f"{limit.what}: not for {asked.stock.model_type} models; {limit.reason}")
