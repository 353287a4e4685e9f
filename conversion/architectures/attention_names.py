"""The attention layers of a model, the names of their tensors, and the encoder and decoder stacks that they are in."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .families import PREFIX, architecture_of, family_of


@dataclass(frozen=True)
class AttentionNames:
    """Checkpoint names of one layer's attention tensors.

    A part is a tensor's name within the attention module of decoders, such as `q_proj.weight`.
    """

    prefix: str
    """Prefix of the layer's attention tensors, such as `model.layers.0.self_attn.`."""
    parts: Mapping[str, str]
    """Prefix of a part -> prefix of its name in this family."""

    def stored(self, part: str) -> str:
        """Return the checkpoint name of a part."""
        names = (new + part.removeprefix(old) for old, new in self.parts.items() if part.startswith(old))
        return self.prefix + next(names, part)

    def part(self, name: str) -> str | None:
        """Return the part of a checkpoint name; None if it is no attention tensor of the layer."""
        if not name.startswith(self.prefix):
            return None
        local = name.removeprefix(self.prefix)
        return next((old + local.removeprefix(new) for old, new in self.parts.items() if local.startswith(new)), None)


def attention_names(config: Any, layer: int) -> AttentionNames:
    """Return the names of a layer's attention tensors."""
    family = family_of(config)
    if family.stacks:
        part, inner = layer_parts(config)[layer]
        return AttentionNames(family.stacks[part].format(layer=inner), family.parts)
    base = "" if architecture_of(config).endswith("Model") else f"{config.model_type.removeprefix(PREFIX)}."
    group, inner = divmod(layer, getattr(config, "inner_group_num", 1))
    prefix = family.attention.format(base=base, layer=layer, group=group, inner=inner)
    return AttentionNames(prefix, family.parts)


def attention_layers(config: Any) -> range:
    """Return the indices of attention layers with separate weights; for a T5, in the order of the forward pass."""
    if parts := layer_parts(config):
        return range(len(parts))
    shared = getattr(config, "num_hidden_groups", None)
    return range(config.num_hidden_layers if shared is None else shared * config.inner_group_num)


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
