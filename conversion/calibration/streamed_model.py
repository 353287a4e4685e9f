"""A model that runs layer by layer: each layer's weights are read from a store before it runs, and freed after it.

The caller runs `embed`, then `call` or `step` for each of `layers`, then `head`. The memory holds one layer, and the
hidden states that the caller keeps. The modules come from transformers and crosshead, so that the outputs equal the
outputs of the model when it is loaded as a whole.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from crosshead.common.errors import ConversionError

from ..architectures.families import EMBEDDING, FUSED, FUSED_EXPERTS, empty_model
from ..sources.tensor_store import TensorStore, checked_entry


class StreamedModel:
    """A causal language model with weights from a tensor store, for a stock or crosshead config.

    By default, `attn_implementation` is chosen as in `from_pretrained`. Layers run on `device`.
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
        """Module -> prefix of its tensors' names in the store."""
        self._set_up()

    def _set_up(self) -> None:
        if self.config.tie_word_embeddings:
            self._prefixes[self._model.lm_head] = EMBEDDING.removesuffix("weight")
        # The only module whose tensors are computed instead of stored.
        model = self._model.model
        self._rotary = model.rotary_emb = type(model.rotary_emb)(config=self.config).to(self.device)

    @property
    def depth(self) -> int:
        """Number of layers, after each of which `run` calls `advance`."""
        return int(self.config.num_hidden_layers)

    def predicted(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the tokens at the positions of the outputs: all tokens (B, T), or a T5's decoder inputs."""
        return tokens

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return embeddings (B, T, hidden) of token ids (B, T). Reads the full matrix: call it once for all tokens."""
        rows = self._stored(EMBEDDING, self._model.model.embed_tokens.weight.shape)
        return functional.embedding(tokens.cpu(), rows).to(self.device, self._dtype)

    def layers(self) -> Iterator[tuple[int, nn.Module]]:
        """Yield each layer with its weights, which are freed when the next layer is requested."""
        for index, layer in enumerate(self._layers()):
            with self._weights(layer):
                yield index, layer

    def _layers(self) -> Iterable[Any]:
        return self._model.model.layers

    def attention(self, layer: Any) -> Any:
        """Return the attention of one of `layers`."""
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
        """Run one of `layers` on hidden states (B, T, hidden), in place, with `batch_size` sequences per call."""
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
        """Yield a function from the last layer's hidden states to logits; its weights are freed with the context."""
        norm, head = self._model.model.norm, self._model.lm_head
        with self._weights(norm), self._weights(head):
            yield lambda hidden: head(norm(hidden))

    @contextmanager
    def whole(self, resident: bool = True) -> Iterator[Any]:
        """Yield the model as a module that can be called within the context.

        With `resident`, all weights are in memory; otherwise each layer's weights are read whenever it is called. The
        outputs are the same.
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
        # The dtype is that of each tensor: a model of any dtype may have some tensors in float32.
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


def check_hidden(hidden: torch.Tensor) -> None:
    """Raise `ConversionError` if hidden states are not finite, as those of a damaged checkpoint."""
    if not hidden.isfinite().all():
        raise ConversionError("the source computes nan or inf on the calibration text: its checkpoint is damaged")
