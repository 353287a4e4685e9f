"""An encoder that runs layer by layer, as `StreamedModel` runs decoders."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..architectures.attention_names import AttentionNames
from ..architectures.families import PREFIX, family_of, stored_names
from .streamed_model import StreamedModel


class AttentionView:
    """Adapter that gives an encoder's stock attention the interface of a decoder's: parameter names, input hooks."""

    def __init__(self, attention: Any, parts: Mapping[str, str]) -> None:
        self._module, self._names = attention, AttentionNames("", parts)
        self._reader = attention.get_submodule(self._names.stored("q_proj.").removesuffix(".").rpartition(".")[0])

    @property
    def o_proj(self) -> Any:
        """Output projection."""
        return self._module.get_submodule(self._names.stored("o_proj.").removesuffix("."))

    def get_parameter(self, part: str) -> nn.Parameter:
        """Return a parameter by its name in decoders."""
        return self._module.get_parameter(self._names.stored(part))

    def register_forward_pre_hook(self, hook: Callable[..., Any], with_kwargs: bool = True) -> RemovableHandle:
        """Register a hook that gets the hidden states as a keyword argument, as in decoders."""
        return self._reader.register_forward_pre_hook(
            lambda module, args: hook(module, (), {"hidden_states": args[0]})
        )


class StreamedEncoder(StreamedModel):
    """An encoder with weights from a tensor store; its outputs are the last hidden states."""

    def _set_up(self) -> None:
        self._base = self._model.base_model

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the hidden states (B, T, hidden) of token ids (B, T); a sequence is a single text segment."""
        embeddings, mapping = self._base.embeddings, getattr(self._base.encoder, "embedding_hidden_mapping_in", None)
        tokens = tokens.to(self.device)
        positions = torch.arange(tokens.shape[1], device=self.device).unsqueeze(0)
        with self._weights(embeddings):
            hidden = embeddings(tokens, position_ids=positions, token_type_ids=torch.zeros_like(tokens))
        if mapping is not None:
            with self._weights(mapping):
                hidden = mapping(hidden)
        return hidden

    def _layers(self) -> list[Any]:
        # Vision transformers other than DINOv2 have `layers`.
        layers = getattr(self._base, "layers", None) or getattr(self._base.encoder, "layer", None)
        if layers is not None:
            return [*layers]
        # ALBERT, whose layers share their weights.
        groups, count = self._base.encoder.albert_layer_groups, self.config.num_hidden_layers
        return [layer for index in range(count) for layer in groups[int(index / (count / len(groups)))].albert_layers]

    def attention(self, layer: Any) -> Any:
        """Return the attention of one of `layers`."""
        is_flat = hasattr(layer.attention, "q_proj")  # DINOv2 in older releases of transformers is not
        return AttentionView(layer.attention, {"": ""} if is_flat else family_of(self.config).parts)

    def call(self, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Run one of `layers` on hidden states (B, T, hidden) of complete sequences without padding."""
        return layer(hidden)

    @contextmanager
    def head(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """Yield the identity, because task heads are copied unchanged."""
        yield lambda hidden: hidden


FEATURES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "vit": lambda hidden: hidden[:, 0],
    "deit": lambda hidden: hidden[:, 0],
    "dinov2": lambda hidden: torch.cat([hidden[:, 0], hidden[:, 1:].mean(1)], dim=-1),
}
"""Stock `model_type` -> function from the hidden states (B, T, hidden) to the inputs of the classifier."""


JOINT, JOINT_PARTS = "mlp.weights_in.", ("mlp.gate_proj.", "mlp.up_proj.")
"""DINOv2's gated linear unit: the name of the fused projection in checkpoints, and the names of its two halves."""


class StreamedImages(StreamedEncoder):
    """A vision transformer with weights from a store; its outputs are logits, or hidden states without classifier."""

    def _set_up(self) -> None:
        super()._set_up()
        self._names = stored_names(self._model)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the hidden states (B, T, hidden) of pixel values (B, channels, height, width)."""
        embeddings = self._base.embeddings
        with self._weights(embeddings):
            return torch.cat([embeddings(image.to(self.device, self._dtype)) for image in tokens.split(1)])

    @contextmanager
    def head(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """Yield a function from the last layer's hidden states (B, T, hidden) to the outputs."""
        norm, classifier = self._base.layernorm, getattr(self._model, "classifier", None)
        features = FEATURES[self.config.model_type.removeprefix(PREFIX)]
        with self._weights(norm):
            if classifier is None:
                yield norm
                return
            with self._weights(classifier):
                yield lambda hidden: classifier(features(norm(hidden)))

    def _stored(self, name: str, shape: torch.Size) -> torch.Tensor:
        for index, part in enumerate(JOINT_PARTS):
            if part in name:
                whole = super()._stored(name.replace(part, JOINT), torch.Size([2 * shape[0], *shape[1:]]))
                return whole.chunk(2)[index]
        return super()._stored(self._names[name], shape)
