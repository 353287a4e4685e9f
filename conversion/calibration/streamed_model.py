"""A model that runs layer by layer: each layer's weights are read from a store before it runs, and freed after it.

The caller drives: `embed`, then each of `layers` through `call`, then `head`. The memory holds one layer, and the
hidden states that the caller keeps. The modules are those of transformers and crosshead, so that the outputs equal
those of the model loaded as a whole.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from ..architectures.families import EMBEDDING, FUSED, FUSED_EXPERTS, empty_model
from ..sources.tensor_store import TensorStore, checked_entry


class StreamedModel:
    """A causal language model over a store, for a stock or crosshead config.

    Without `attn_implementation`, attention is the one that `from_pretrained` would choose. Layers run on `device`.
    """

    def __init__(
        self,
        store: TensorStore,
        config: Any,
        dtype: torch.dtype = torch.float32,
        attn_implementation: str | None = None,
        device: str = "cpu",
    ) -> None:
        self._store, self._dtype, self.device = store, dtype, torch.device(device)
        self._model = empty_model(config, dtype=dtype, attn_implementation=attn_implementation)
        self._model.requires_grad_(False).eval()
        self.config = self._model.config
        self._prefixes = {module: f"{name}." if name else "" for name, module in self._model.named_modules()}
        """Of the names of a module's tensors in the store."""
        self._set_up()

    def _set_up(self) -> None:
        if self.config.tie_word_embeddings:
            self._prefixes[self._model.lm_head] = EMBEDDING.removesuffix("weight")
        # The only module whose tensors are computed instead of stored.
        model = self._model.model
        self._rotary = model.rotary_emb = type(model.rotary_emb)(config=self.config).to(self.device)

    @property
    def depth(self) -> int:
        """The number of layers that `run` reports."""
        return int(self.config.num_hidden_layers)

    def predicted(self, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens of which each output predicts the next one, of those that the model reads (B, T)."""
        return tokens

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids (B, T) -> hidden states (B, T, hidden). Reads the whole embedding: call it once for all tokens."""
        rows = self._stored(EMBEDDING, self._model.model.embed_tokens.weight.shape)
        return functional.embedding(tokens.cpu(), rows).to(self.device, self._dtype)

    def layers(self) -> Iterator[tuple[int, nn.Module]]:
        """Each layer with its weights, which are freed when the next layer is requested."""
        for index, layer in enumerate(self._layers()):
            with self._weights(layer):
                yield index, layer

    def _layers(self) -> Iterable[Any]:
        return self._model.model.layers

    def attention(self, layer: Any) -> Any:
        """The attention of one of `layers`."""
        return layer.self_attn

    def call(self, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Run one of `layers` on hidden states (B, T, hidden) of complete sequences without padding."""
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        is_sliding = getattr(layer.self_attn, "sliding_window", None) is not None
        mask = (create_sliding_window_causal_mask if is_sliding else create_causal_mask)(
            self.config, hidden, None, None, position_ids=positions
        )
        return layer(
            hidden,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self._rotary(hidden, positions),
            use_cache=False,
        )

    def step(self, layer: nn.Module, hidden: torch.Tensor, batch_size: int = 1) -> None:
        """Run one of `layers` on hidden states (B, T, hidden), in place, `batch_size` sequences in a call."""
        for sequences in hidden.split(batch_size):
            sequences.copy_(self.call(layer, sequences))

    def run(self, tokens: torch.Tensor, advance: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Run all layers on token ids (B, T), one sequence at a time; `advance` is called after every layer."""
        hidden = self.embed(tokens)
        for _, layer in self.layers():
            self.step(layer, hidden)
            advance()
        return hidden

    @contextmanager
    def head(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """A function from the last layer's hidden states to logits; its weights are freed with the context."""
        norm, head = self._model.model.norm, self._model.lm_head
        with self._weights(norm), self._weights(head):
            yield lambda hidden: head(norm(hidden))

    @contextmanager
    def whole(self, resident: bool = True) -> Iterator[Any]:
        """The model as a module, within the context.

        If it is `resident`, all weights are in memory; if not, each layer's weights are read whenever it is called.
        The outputs are the same.
        """
        model = self._model
        rotary, model.model.rotary_emb = model.model.rotary_emb, self._rotary
        with ExitStack() as loaded:
            loaded.callback(setattr, model.model, "rotary_emb", rotary)
            loaded.enter_context(self._weights(model.model.embed_tokens))
            loaded.enter_context(self.head())
            for layer in model.model.layers:
                loaded.enter_context(self._weights(layer) if resident else self._weights_during_calls(layer))
            yield model

    @contextmanager
    def _weights_during_calls(self, module: nn.Module) -> Iterator[None]:
        """Load a module's weights before each call, and free them after it."""
        loaded = ExitStack()
        with (
            module.register_forward_pre_hook(lambda *_: loaded.enter_context(self._weights(module))),
            module.register_forward_hook(lambda *_: loaded.close(), always_call=True),
        ):
            yield

    @contextmanager
    def _weights(self, module: nn.Module) -> Iterator[None]:
        """Load a module's weights within the context."""
        empty, prefix = module.state_dict(), self._prefixes[module]
        # A model of any dtype may have some tensors in float32.
        loaded = {
            name: self._tensor(prefix + name, old.shape).to(self.device, old.dtype) for name, old in empty.items()
        }
        module.load_state_dict(loaded, assign=True)
        try:
            yield
        finally:
            module.to("meta")

    def _tensor(self, name: str, shape: torch.Size) -> torch.Tensor:
        match = FUSED_EXPERTS.fullmatch(name)
        if match is None:
            return self._stored(name, shape)
        fused, parts = torch.empty(shape, dtype=self._dtype), FUSED[match[2]]  # (experts, rows of all parts, columns)
        for expert, rows in enumerate(fused):
            for part, target in zip(parts, rows.chunk(len(parts)), strict=True):
                target.copy_(self._stored(f"{match[1]}{expert}.{part}.weight", target.shape))
        return fused

    def _stored(self, name: str, shape: torch.Size) -> torch.Tensor:
        checked_entry(self._store, name, tuple(shape))
        return self._store.read(name)
