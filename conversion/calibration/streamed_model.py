"""A model that runs layer by layer, each layer's weights read from a store when its turn comes and freed after it.

The caller drives: `embed`, then each of `layers` through `call`, then `head`. In memory are one layer, the hidden
states that the caller keeps, and nothing else of the model. The modules are the library's and ours, so that the
numbers are those of the model loaded whole.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from crosshead.common.errors import ConversionError

from ..architectures.families import PREFIX, layer_prefix
from ..plan import EMBEDDING, HEAD
from ..sources.tensor_store import TensorStore

NORM_PREFIX, EMBEDDING_PREFIX = "model.norm.", EMBEDDING.removesuffix("weight")
FUSED = {"mlp.experts.gate_up_proj": ("gate_proj", "up_proj"), "mlp.experts.down_proj": ("down_proj",)}
"""What the model holds for all experts at once -> what is stored of each expert, in the order of its rows."""


def _never(config: Any, layer: int) -> bool:
    return False


def _by_layer_type(config: Any, layer: int) -> bool:
    return bool(config.layer_types[layer] == "sliding_attention")


def _by_window(config: Any, layer: int) -> bool:
    return config.sliding_window is not None


SLIDES: dict[str, Callable[[Any, int], bool]] = {
    "llama": _never,
    "qwen2": _by_layer_type,
    "qwen3": _by_layer_type,
    "qwen3_moe": _by_window,
}
"""The family -> whether a layer attends within a sliding window."""


class StreamedModel:
    """A causal language model over a store, for a stock config or one of ours.

    Without `attn_implementation`, attention is what `from_pretrained` would choose. `attention` says which.
    """

    def __init__(
        self,
        store: TensorStore,
        config: Any,
        dtype: torch.dtype = torch.float32,
        attn_implementation: str | None = None,
    ) -> None:
        self._store, self._dtype = store, dtype
        options = {"dtype": dtype, "attn_implementation": attn_implementation}
        with torch.device("meta"):  # copied, because the library writes its choices into the config
            model: Any = AutoModelForCausalLM.from_config(deepcopy(config), **options)
        self._model = model.requires_grad_(False).eval()
        self.config = model.config
        self.attention: str = model.config._attn_implementation
        self._slides = SLIDES[model.config.model_type.removeprefix(PREFIX)]
        self._head_prefix = EMBEDDING_PREFIX if model.config.tie_word_embeddings else HEAD.removesuffix("weight")
        # The one part that is computed, not stored.
        self._rotary = model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids (B, T) -> hidden states (B, T, hidden). Reads the whole embedding: call it once for all."""
        rows = self._stored(EMBEDDING, self._model.model.embed_tokens.weight.shape)
        return functional.embedding(tokens, rows).to(self._dtype)

    def layers(self) -> Iterator[tuple[int, nn.Module]]:
        """Each decoder layer in turn with its weights, which are gone when the next one is asked for."""
        for index, layer in enumerate(self._model.model.layers):
            with self._weights(layer, layer_prefix(index)):
                yield index, layer

    def call(self, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """One of `layers` on hidden states (B, T, hidden), whole sequences without padding."""
        attention: Any = layer.self_attn
        positions = torch.arange(hidden.shape[1]).unsqueeze(0)
        slides = self._slides(self.config, attention.layer_idx)
        mask = (create_sliding_window_causal_mask if slides else create_causal_mask)(
            config=self.config, inputs_embeds=hidden, attention_mask=None, past_key_values=None, position_ids=positions
        )
        return layer(
            hidden,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self._rotary(hidden, positions),
            use_cache=False,
        )

    def step(self, layer: nn.Module, hidden: torch.Tensor) -> None:
        """Put hidden states (B, T, hidden) through one of `layers`, in place and one sequence at a time."""
        for sequence in hidden.split(1):
            sequence.copy_(self.call(layer, sequence))

    def run(self, tokens: torch.Tensor, advance: Callable[[], None] = lambda: None) -> torch.Tensor:
        """All layers on token ids (B, T), one sequence at a time; `advance` is called after every layer."""
        hidden = self.embed(tokens)
        for _, layer in self.layers():
            self.step(layer, hidden)
            advance()
        return hidden

    @contextmanager
    def head(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """A function from the last layer's hidden states to logits; its weights are freed with the context."""
        norm, head = self._model.model.norm, self._model.lm_head
        with self._weights(norm, NORM_PREFIX), self._weights(head, self._head_prefix):
            yield lambda hidden: head(norm(hidden))

    @contextmanager
    def whole(self, resident: bool = True) -> Iterator[Any]:
        """The library's own model, for as long as the context.

        All its weights are in memory; where it is not `resident`, each layer's are read whenever it is called. Both
        compute the same numbers.
        """
        model = self._model
        rotary, model.model.rotary_emb = model.model.rotary_emb, self._rotary
        with ExitStack() as loaded:
            loaded.callback(setattr, model.model, "rotary_emb", rotary)
            loaded.enter_context(self._weights(model.model.embed_tokens, EMBEDDING.removesuffix("weight")))
            loaded.enter_context(self.head())
            for index, layer in enumerate(model.model.layers):
                weights = self._weights if resident else self._weights_of_a_call
                loaded.enter_context(weights(layer, layer_prefix(index)))
            yield model

    @contextmanager
    def _weights_of_a_call(self, module: nn.Module, prefix: str) -> Iterator[None]:
        """Let a module have its weights only while it is called."""
        held = ExitStack()
        handles = [
            module.register_forward_pre_hook(lambda *_: held.enter_context(self._weights(module, prefix))),
            module.register_forward_hook(lambda *_: held.close(), always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _weights(self, module: nn.Module, prefix: str) -> Iterator[None]:
        """Weights in a module for a while; `prefix` is what their stored names start with."""
        empty = module.state_dict()
        # A model of any dtype may hold some tensors in float32.
        filled = {name: self._tensor(prefix + name, old.shape).to(old.dtype) for name, old in empty.items()}
        module.load_state_dict(filled, assign=True)
        try:
            yield
        finally:
            module.to("meta")

    def _tensor(self, name: str, shape: torch.Size) -> torch.Tensor:
        suffix = next((suffix for suffix in FUSED if name.endswith(suffix)), None)
        if suffix is None:
            return self._stored(name, shape)
        fused = torch.empty(shape, dtype=self._dtype)  # (experts, rows of all parts, columns)
        prefix = name.removesuffix(suffix) + "mlp.experts."
        for expert, rows in enumerate(fused):
            for part, target in zip(FUSED[suffix], rows.chunk(len(FUSED[suffix])), strict=True):
                target.copy_(self._stored(f"{prefix}{expert}.{part}.weight", target.shape))
        return fused

    def _stored(self, name: str, shape: torch.Size) -> torch.Tensor:
        entry = self._store.entries.get(name)
        if entry is None:
            raise ConversionError(f"the tensor {name} is missing: the config asks for it in the shape {list(shape)}")
        if entry.shape != tuple(shape):
            raise ConversionError(
                f"the tensor {name} has the shape {list(entry.shape)}, but the config asks for {list(shape)}"
            )
        return self._store.read(name)
