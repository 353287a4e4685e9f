"""`explicit` with half the component heads, decoding one token, beside stock attention on all heads.

The keys and values of several layers take turns, as in a model: by the time a layer's turn comes again, nothing of it
is left in the processor's cache. A model is measured with all it does for a token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from crosshead.modeling.explicit_decode import Components, attend_to_components
from crosshead.modeling.modeling_crosshead import CrossheadLlamaForCausalLM

Pair = tuple[Callable[[], object], Callable[[], object]]
"""Ours and the rival."""
COLD_BYTES = 2**28
"""Of the rival's keys and values, in all turns together: more than a processor's cache holds."""
LAYERS = 2


@dataclass(frozen=True)
class Shape:
    """The heads of a layer, and how much it has seen."""

    query_heads: int
    key_value_heads: int
    head_dim: int
    keys: int
    batch: int

    @property
    def name(self) -> str:
        """As a row of a table starts."""
        heads = f"{self.query_heads} query heads, {self.key_value_heads} KV heads of {self.head_dim}"
        return f"{heads}, {self.keys} tokens, batch {self.batch}"


TARGETS = tuple(Shape(32, 8, 128, keys, batch) for keys in (8192, 32768) for batch in (1, 8))
"""Where half of stock's time is wanted."""
OTHERS = (
    *(Shape(16, 16, 64, keys, batch) for keys in (512, 2048, 8192) for batch in (1, 8)),
    *(Shape(32, 8, 128, keys, batch) for keys in (128, 512, 2048) for batch in (1, 8)),
    *(Shape(32, 4, 128, keys, 1) for keys in (2048, 8192)),
    *(Shape(14, 2, 64, keys, 1) for keys in (2048, 8192)),
)
"""Where no shape may be slower."""


def attention_pair(shape: Shape) -> Pair:
    """Attention alone: the combination is part of it."""
    heads, grouped = shape.key_value_heads, shape.query_heads // shape.key_value_heads
    query = torch.randn(shape.batch, shape.query_heads, 1, shape.head_dim)
    scaling = shape.head_dim**-0.5
    full, half = _turns(shape, heads), _turns(shape, heads // 2)
    scalars = [torch.randn(heads, heads // 2) for _ in range(2)]
    module: Any = nn.Module()
    module.num_key_value_groups = grouped

    def ours() -> object:
        with torch.no_grad():
            keys, values = (Components(x, c) for x, c in zip(next(half), scalars, strict=True))
            rows = (query * scaling).reshape(shape.batch, heads, grouped, shape.head_dim)
            return attend_to_components(rows, keys, values, None, None)

    def stock() -> object:
        with torch.no_grad():
            keys, values = next(full)
            return sdpa_attention_forward(module, query, keys, values, None, scaling=scaling)

    return ours, stock


def model_pair(keys: int) -> Pair:
    """One more token through a model of hidden size 1024; the cache is cut back to its length every time."""
    shape: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 1024,
        "max_position_embeddings": 2 * keys,
        "attn_implementation": "sdpa",
    }
    mixers = {"explicit": {"key_heads": 4, "value_heads": 4, "norm": False}}
    ours = CrossheadLlamaForCausalLM(AutoConfig.for_model("crosshead_llama", **shape, mixers=mixers)).eval()
    stock = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape)).eval()
    return _decoder(ours, keys, heads=4), _decoder(stock, keys, heads=8)


def cache_bytes(shape: Shape) -> tuple[int, int]:
    """What one token more holds for one sequence, ours and stock, by the tensors that are kept."""
    sizes: list[int] = []
    for heads in (shape.key_value_heads // 2, shape.key_value_heads):
        cache = DynamicCache()
        token = torch.zeros(1, heads, 1, shape.head_dim)
        cache.update(token, token.clone(), 0)
        layer: Any = cache.layers[0]
        sizes.append(layer.keys.untyped_storage().nbytes() + layer.values.untyped_storage().nbytes())
    return sizes[0], sizes[1]


def _turns(shape: Shape, heads: int) -> Any:
    """Keys and values of as many layers as it takes to be cold, for ever."""
    size = (shape.batch, heads, shape.keys, shape.head_dim)
    rival = 8 * shape.batch * shape.key_value_heads * shape.keys * shape.head_dim
    return cycle([(torch.randn(size), torch.randn(size)) for _ in range(max(1, -(-COLD_BYTES // rival)))])


def _decoder(model: Any, keys: int, heads: int) -> Callable[[], object]:
    cache = DynamicCache(config=model.config)
    for layer in range(LAYERS):
        cache.update(torch.randn(1, heads, keys, 128), torch.randn(1, heads, keys, 128), layer)
    token = torch.ones(1, 1, dtype=torch.long)

    def decode() -> object:
        with torch.no_grad():
            output = model(token, past_key_values=cache)
        cache.crop(-1)
        return output

    return decode
