"""An encoder that runs layer by layer, as `StreamedModel` runs decoders."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..architectures.attention_names import AttentionNames, attention_names
from ..architectures.families import PREFIX, family_of, stored_names
from .streamed_model import StreamedModel

Hook = Callable[..., Any]


def _bert_layers(encoder: Any, config: Any) -> Iterator[tuple[str, Any]]:
    for index, layer in enumerate(encoder.layer):
        yield f"layer.{index}.", layer


def _albert_layers(encoder: Any, config: Any) -> Iterator[tuple[str, Any]]:
    for index in range(config.num_hidden_layers):
        group = int(index / (config.num_hidden_layers / config.num_hidden_groups))
        for inner, layer in enumerate(encoder.albert_layer_groups[group].albert_layers):
            yield f"albert_layer_groups.{group}.albert_layers.{inner}.", layer


LAYERS: Mapping[str, Callable[[Any, Any], Iterator[tuple[str, Any]]]] = {
    "bert": _bert_layers,
    "albert": _albert_layers,
}
"""The stock `model_type` -> each layer that runs, and the prefix of its tensors within the encoder."""


class AttentionView:
    """A stock attention layer of an encoder, as one of a decoder: its projections and the hooks on its inputs."""

    def __init__(self, attention: Any, parts: Mapping[str, str]) -> None:
        self._module, self._names = attention, AttentionNames("", parts)
        self._reader = attention.get_submodule(self._names.stored("q_proj.").removesuffix(".").rpartition(".")[0])

    @property
    def o_proj(self) -> Any:
        """The output projection."""
        return self._module.get_submodule(self._names.stored("o_proj.").removesuffix("."))

    def get_parameter(self, part: str) -> nn.Parameter:
        """A parameter by its name in decoders."""
        return self._module.get_parameter(self._names.stored(part))

    def register_forward_pre_hook(self, hook: Hook, with_kwargs: bool = True) -> RemovableHandle:
        """Call a hook with the hidden states as a keyword argument, as decoders are called."""
        return self._reader.register_forward_pre_hook(
            lambda module, args: hook(module, (), {"hidden_states": args[0]})
        )


class StreamedEncoder(StreamedModel):
    """An encoder over a store; its outputs are the last hidden states."""

    def _set_up(self) -> None:
        self._base = self._model.base_model
        self._prefix = attention_names(self.config, 0).prefix.partition("encoder.")[0]

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids (B, T) of one text each -> hidden states (B, T, hidden)."""
        embeddings, mapping = self._base.embeddings, getattr(self._base.encoder, "embedding_hidden_mapping_in", None)
        tokens = tokens.to(self.device)
        positions = torch.arange(tokens.shape[1], device=self.device).unsqueeze(0)
        with self._weights(embeddings, f"{self._prefix}embeddings."):
            hidden = embeddings(tokens, position_ids=positions, token_type_ids=torch.zeros_like(tokens))
        if mapping is not None:
            with self._weights(mapping, f"{self._prefix}encoder.embedding_hidden_mapping_in."):
                hidden = mapping(hidden)
        return hidden

    def layers(self) -> Iterator[tuple[int, nn.Module]]:
        """Each layer with its weights, which are freed when the next layer is requested."""
        kind = self.config.model_type.removeprefix(PREFIX)
        for index, (prefix, layer) in enumerate(LAYERS[kind](self._base.encoder, self.config)):
            with self._weights(layer, f"{self._prefix}encoder.{prefix}"):
                yield index, layer

    def attention(self, layer: Any) -> Any:
        """The attention of one of `layers`."""
        return AttentionView(layer.attention, family_of(self.config).parts or {})

    def call(self, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Run one of `layers` on hidden states (B, T, hidden) of complete sequences without padding."""
        return layer(hidden, None)

    @contextmanager
    def head(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """The identity: heads of tasks are copied unchanged."""
        yield lambda hidden: hidden


FEATURES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "vit": lambda hidden: hidden[:, 0],
    "deit": lambda hidden: hidden[:, 0],
    "dinov2": lambda hidden: torch.cat([hidden[:, 0], hidden[:, 1:].mean(1)], dim=-1),
}
"""The stock `model_type` -> what its classifier reads of the hidden states (B, T, hidden)."""


JOINT, JOINT_PARTS = "mlp.weights_in.", ("mlp.gate_proj.", "mlp.up_proj.")
"""DINOv2's gated linear unit: the name in checkpoints of two projections, one after the other -> their names."""


class StreamedImages(StreamedEncoder):
    """A vision transformer over a store; its outputs are logits of classes, or without a classifier hidden states."""

    def _set_up(self) -> None:
        self._base = self._model.base_model
        self._prefix = "" if self._base is self._model else f"{self._model.base_model_prefix}."
        self._names = stored_names(self._model)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Pixel values (B, channels, height, width) -> hidden states (B, T, hidden)."""
        embeddings = self._base.embeddings
        with self._weights(embeddings, f"{self._prefix}embeddings."):
            return torch.cat([embeddings(image.to(self.device, self._dtype)) for image in tokens.split(1)])

    def layers(self) -> Iterator[tuple[int, nn.Module]]:
        """Each layer with its weights, which are freed when the next layer is requested."""
        place, layers = ("layers", getattr(self._base, "layers", None))
        if layers is None:  # DINOv2
            place, layers = "encoder.layer", self._base.encoder.layer
        for index, layer in enumerate(layers):
            with self._weights(layer, f"{self._prefix}{place}.{index}."):
                yield index, layer

    def attention(self, layer: Any) -> Any:
        """The attention of one of `layers`."""
        is_flat = hasattr(layer.attention, "q_proj")  # DINOv2 in older releases of transformers is not
        return AttentionView(layer.attention, {} if is_flat else family_of(self.config).parts or {})

    def call(self, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Run one of `layers` on hidden states (B, T, hidden)."""
        return layer(hidden)

    @contextmanager
    def head(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """A function from the last layer's hidden states (B, T, hidden) to the outputs."""
        norm, classifier = self._base.layernorm, getattr(self._model, "classifier", None)
        features = FEATURES[self.config.model_type.removeprefix(PREFIX)]
        with self._weights(norm, f"{self._prefix}layernorm."):
            if classifier is None:
                yield norm
                return
            with self._weights(classifier, "classifier."):
                yield lambda hidden: classifier(features(norm(hidden)))

    def _stored(self, name: str, shape: torch.Size) -> torch.Tensor:
        for place, part in enumerate(JOINT_PARTS):
            if part in name:
                whole = super()._stored(name.replace(part, JOINT), torch.Size([2 * shape[0], *shape[1:]]))
                return whole.chunk(2)[place]
        return super()._stored(self._names[name], shape)
