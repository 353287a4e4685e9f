"""Encoder and decoder stacks: whether a model has a decoder, and the part of a T5 that an attention layer is in."""

from typing import Any

from .families import architecture_of, family_of


def decodes(config: Any) -> bool:
    """True if a model has a decoder."""
    return not family_of(config).is_encoder or bool(getattr(config, "is_encoder_decoder", False))


def predicts_tokens(config: Any) -> bool:
    """True if the outputs of a model are logits of the next token."""
    return not family_of(config).is_encoder or architecture_of(config).endswith("ForConditionalGeneration")


def layer_parts(config: Any) -> list[tuple[str, int]]:
    """Return (part, index within the part) of each attention layer of a T5; empty for other models."""
    family = family_of(config)
    return family.crosshead.attention_modules(config) if family.stacks else []


def parts_of(config: Any) -> dict[str, list[int]]:
    """Return the parts of a T5 -> indices of their attention layers; empty for other models."""
    parts: dict[str, list[int]] = {}
    for layer, (part, _) in enumerate(layer_parts(config)):
        parts.setdefault(part, []).append(layer)
    return parts
