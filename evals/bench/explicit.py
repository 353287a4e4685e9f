"""`explicit` with half the component heads, decoding one token, beside stock attention on all heads.

Without a mask, the library has stock attention's query heads share keys inside the kernel, which on a CPU is slow;
with one, as for a padded batch, those that share keys become the queries of one head where there is one token, which
takes about half as long; of several tokens, it repeats the keys.
"""

from typing import Any

import torch

from crosshead.modeling.mechanisms.base import AttentionState, HeadLayout

from .attention import SEED, in_one_layer, layers_in_turn, mixed, stock
from .case import TOLD, Case
from .models import SHAPE, model, next_token
from .models import STOCK as STOCK_MODEL
from .pairs import Run

HEADS = {
    "grouped": {"query_heads": 32, "key_value_heads": 8, "head_dim": 128},
    "ungrouped": {"query_heads": 16, "key_value_heads": 16, "head_dim": 64},
    "many": {"query_heads": 32, "key_value_heads": 32, "head_dim": 128},
    "few": {"query_heads": 14, "key_value_heads": 2, "head_dim": 64},
}
STOCK = "stock sdpa attention on all heads"
PADDED, NORMED, TWO = "padded", "normed keys", "two at once"
"""Kinds of decoding that need more than the plain one: a mask, keys that the backbone norms, a query more."""


def decoding(
    ours: bool,
    query_heads: int,
    key_value_heads: int,
    head_dim: int,
    tokens: int,
    batch: int,
    kind: str = "",
) -> Run:
    """Attention of one query, or of two; the combination of half as many components is part of ours."""
    torch.manual_seed(SEED)
    query = torch.randn(batch, query_heads, 2 if kind == TWO else 1, head_dim)
    heads = key_value_heads // 2 if ours else key_value_heads
    past = layers_in_turn(batch, heads, tokens, head_dim, rivals=key_value_heads, side_by_side=ours)
    options = {"key_heads": heads if ours else None, "value_heads": heads if ours else None, "norm": False}
    eps = 1e-6 if kind == NORMED else None
    layout = HeadLayout(query_heads * head_dim, query_heads, key_value_heads, head_dim, key_norm_eps=eps)
    explicit = in_one_layer("explicit", options, layout)
    for scalars in explicit.parameters():
        torch.nn.init.normal_(scalars)
    numbers = torch.rand(batch, tokens, key_value_heads if kind == NORMED else 0)
    beside = {"explicit.inverse_rms": numbers} if kind == NORMED else {}
    mask = _mask(kind, tokens)
    mask = None if mask is None else mask.expand(batch, 1, -1, -1)

    def attend() -> object:
        with torch.no_grad():
            key, value = next(past)
            if ours:
                return mixed(explicit, AttentionState(query, query, query, key, value, beside), mask)
            return stock(query, key, value, mask)

    return attend


def _mask(kind: str, tokens: int) -> torch.Tensor | None:
    """(queries, tokens): what each query may see; None where that is all."""
    keys = torch.arange(tokens)
    if kind == TWO:
        return keys <= torch.tensor([[tokens - 2], [tokens - 1]])
    return (keys >= tokens // 16)[None] if kind == PADDED else None


def control(ours: bool, **shape: Any) -> Run:
    """Stock attention, whichever side it is: how far from 1 a figure may be by chance."""
    return decoding(False, **shape)


def cache_bytes(ours: bool, tokens: int, **shape: Any) -> Run:
    """What a model's cache holds of one sequence, by the tensors that are kept."""
    evaluated, ids = model(ours, tokens=tokens, **shape).eval(), torch.ones(1, tokens, dtype=torch.long)

    def count() -> int:
        with torch.no_grad():
            layers = evaluated(ids).past_key_values.layers
        return sum(x.numel() * x.element_size() for layer in layers for x in (layer.keys, layer.values))

    return count


def _case(heads: str, tokens: int, batch: int, target: float, kind: str = "") -> Case:
    shape = HEADS[heads] | {"tokens": tokens, "batch": batch, "kind": kind}
    told = "{query_heads} query and {key_value_heads} KV heads of {head_dim}".format_map(shape)
    what = f"explicit, a token after {tokens}, batch {batch}, {kind}{', ' * bool(kind)}{told}"
    length = f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)
    name = "-".join([heads, length, *([f"batch-{batch}"] if batch > 1 else []), *kind.split()[:1]])
    return Case(name, what, STOCK, decoding, shape, {"cpu": target, "cuda": target})


def _control(batch: int) -> Case:
    shape = HEADS["ungrouped"] | {"tokens": 2048, "batch": batch}
    what = f"stock sdpa attention on both sides, a token after 2048, batch {batch}, 16 heads of 64"
    return Case(f"control-batch-{batch}", what, "itself", control, shape)


def _model(heads: str, tokens: int) -> dict[str, Any]:
    names = {"query_heads": "num_attention_heads", "key_value_heads": "num_key_value_heads", "head_dim": "head_dim"}
    counts = {names[key]: count for key, count in HEADS[heads].items()}
    half = counts["num_key_value_heads"] // 2
    mixers = {"explicit": {"key_heads": half, "value_heads": half, "norm": False}}
    return SHAPE | counts | {"mixers": mixers, "tokens": tokens}


def _token(name: str, heads: str, tokens: int, target: float) -> Case:
    told = "{query_heads} query and {key_value_heads} KV heads of {head_dim}".format_map(HEADS[heads])
    what = f"explicit, a token after {tokens} others, whole model, {told}"
    return Case(name, what, STOCK_MODEL, next_token, _model(heads, tokens), {"cpu": target, "cuda": target})


CASES = (
    *(_case("grouped", tokens, batch, 0.5) for tokens in (8192, 32768) for batch in (1, 8)),
    *(_case("grouped", tokens, batch, 1.0) for tokens in (128, 512, 2048) for batch in (1, 8)),
    *(_case("ungrouped", tokens, batch, 1.0) for tokens in (128, 512, 2048, 8192, 32768) for batch in (1, 8)),
    *(_case("many", tokens, 1, 1.0) for tokens in (2048, 8192, 32768)),
    *(_case("few", tokens, 1, 1.0) for tokens in (2048, 8192)),
    *(_case("grouped", tokens, 1, 1.0, PADDED) for tokens in (8192, 32768)),
    *(_case("grouped", tokens, 1, 0.5, NORMED) for tokens in (8192, 32768)),
    *(_case("grouped", tokens, 1, 1.0, TWO) for tokens in (8192, 32768)),
    *map(_control, (1, 8)),
    _token("model-16k", "grouped", 16384, 0.9),
    *(_token(f"model-{tokens}", "grouped", tokens, 1.0) for tokens in (128, 512)),
    *(_token(f"model-ungrouped-{tokens}", "ungrouped", tokens, 1.0) for tokens in (128, 512)),
    Case(
        "cache",
        "explicit, bytes of KV cache of a sequence, 4 component heads for 8",
        STOCK_MODEL,
        cache_bytes,
        _model("grouped", 16),
        {"cpu": 0.5, "cuda": 0.5},
        TOLD,
        "bytes",
    ),
)
