"""A T5 that runs layer by layer, as `StreamedModel` runs decoders.

A layer is one attention: the self-attention of each encoder block, then the self-attention and the cross-attention of
each decoder block. The last attention of a block runs together with the feed-forward network. The hidden states of
both stacks are one tensor (B, T, hidden): the encoder reads the first half of each window, the decoder the second.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from transformers.masking_utils import create_causal_mask

from crosshead.modeling.backbones.t5 import CROSS, DECODER, ENCODER

from ..architectures.attention_names import decodes, layer_parts
from ..architectures.families import family_of, stored_embedding
from ..verification.reload_worker import model_inputs
from .streamed_encoder import AttentionView
from .streamed_model import StreamedModel


class AttentionLayer(NamedTuple):
    """One attention layer of a T5."""

    part: str
    """Part of the model: encoder, decoder or cross."""
    inner: int
    """Index of the block in its stack."""
    block: Any
    """The block that contains the attention."""


class StreamedT5(StreamedModel):
    """A T5 with weights from a tensor store; its outputs are logits, or without an LM head the last hidden states."""

    def _set_up(self) -> None:
        self._embeddings, self._embedding = stored_embedding(self._model, self._store.entries)
        self._decodes = decodes(self.config)
        self._biases: dict[str, torch.Tensor] = {}

    @property
    def depth(self) -> int:
        """Number of attention layers."""
        return len(layer_parts(self.config))

    def predicted(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the decoder's tokens."""
        return model_inputs(self.config, tokens)["decoder_input_ids"]

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings (B, T, hidden) for both stacks of token ids (B, T)."""
        rows = self._stored("encoder.embed_tokens.weight", self._model.shared.weight.shape)
        read = torch.cat([*model_inputs(self.config, tokens.cpu()).values()], dim=1)
        return functional.embedding(read, rows).to(self.device, self._dtype)

    def layers(self) -> Iterator[tuple[int, Any]]:
        """Yield each attention layer with its weights, which are freed after the last attention of a block."""
        parts = {ENCODER: [ENCODER], DECODER: [DECODER, CROSS]}
        index = count()
        for name in (ENCODER, DECODER) if self._decodes else (ENCODER,):
            stack = getattr(self._model, name)
            with self._weights(stack.final_layer_norm):
                for inner, block in enumerate(stack.block):
                    with self._weights(block):
                        for part in parts[name]:
                            yield next(index), AttentionLayer(part, inner, block)

    def attention(self, layer: Any) -> Any:
        """Return the attention of one of `layers`."""
        sublayer = layer.block.layer[int(layer.part == CROSS)]
        attention = sublayer.EncDecAttention if layer.part == CROSS else sublayer.SelfAttention
        return AttentionView(attention, family_of(self.config).parts)

    def call(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Run one of `layers` on hidden states (B, T, hidden) of complete sequences without padding.

        The first block of a stack computes the position bias that later blocks reuse. The last block is followed by
        the final norm of its stack.
        """
        half = hidden.shape[1] // 2 if self._decodes else hidden.shape[1]
        text, answer = hidden[:, :half], hidden[:, half:]
        bias = self._biases.get(layer.part) if layer.inner else None
        if layer.part == ENCODER:
            text, self._biases[ENCODER], _ = layer.block(text, None, bias)
            text = self._ended(layer, text)
        elif layer.part == DECODER:
            mask = create_causal_mask(self._model.decoder.config, answer, None, None)
            answer, self._biases[DECODER], _ = layer.block.layer[0](answer, attention_mask=mask, position_bias=bias)
        else:
            answer = layer.block.layer[1](answer, key_value_states=text)[0]
            answer = self._ended(layer, layer.block.layer[2](answer))
        return torch.cat([text, answer], dim=1)

    def _ended(self, layer: AttentionLayer, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states after a block, with the final norm of the stack after its last block."""
        stack = getattr(self._model, ENCODER if layer.part == ENCODER else DECODER)
        return stack.final_layer_norm(hidden) if layer.inner == len(stack.block) - 1 else hidden

    def run(self, tokens: torch.Tensor, advance: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Run all layers on token ids (B, T) and return the hidden states of the last stack."""
        hidden = super().run(tokens, advance)
        return hidden[:, tokens.shape[1] // 2 :] if self._decodes else hidden

    @contextmanager
    def head(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """Yield a function from the hidden states after the final norm to the outputs."""
        head = getattr(self._model, "lm_head", None)
        if head is None:
            yield lambda hidden: hidden
            return
        scale = self.config.d_model**-0.5 if self.config.scale_decoder_outputs else 1.0
        with self._weights(head):
            yield lambda hidden: head(hidden * scale)

    @contextmanager
    def whole(self, resident: bool = True) -> Iterator[Any]:
        """Yield the model as a module, with all weights in memory within the context."""
        with self._weights(self._model):
            yield self._model

    def _stored(self, name: str, shape: torch.Size) -> torch.Tensor:
        is_tied = name in self._embeddings and name not in self._store.entries
        return super()._stored(self._embedding if is_tied else name, shape)
