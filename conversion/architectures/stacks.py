"""The stacks of a model: whether it has a decoder, and the parts of a T5 that its attention layers belong to."""

from typing import Any

from .families import architecture_of, family_of


def decodes(config: Any) -> bool:
    """Whether a model has a decoder."""
    return not family_of(config).is_encoder or bool(getattr(config, "is_encoder_decoder", False))


def predicts_tokens(config: Any) -> bool:
    """Whether the outputs of a model are logits of the next token."""
    return not family_of(config).is_encoder or architecture_of(config).endswith("ForConditionalGeneration")


def places_of(config: Any) -> list[tuple[str, int]]:
    """The part of each attention layer of a T5, and its layer there; empty for other models."""
    family = family_of(config)
    return family.crosshead.places(config) if family.stacks else []


def parts_of(config: Any) -> dict[str, list[int]]:
    """The parts of a T5 -> their attention layers; empty for other models."""
    parts: dict[str, list[int]] = {}
    for layer, (part, _) in enumerate(places_of(config)):
        parts.setdefault(part, []).append(layer)
    return parts
