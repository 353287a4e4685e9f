"""Benchmark runs of one attention layer: `mixture`, `talking` and `explicit`, and the attention that they replace.

Ours and the baseline have the same random queries, keys and values.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from crosshead.modeling.configuration import complete_mixers, layer_settings, shared_layout
from crosshead.modeling.mechanisms import MECHANISMS
from crosshead.modeling.mechanisms.base import AttentionState, HeadLayout, Mechanism
from crosshead.modeling.mechanisms.mixture import mixture_attention_forward
from crosshead.modeling.mechanisms.talking import talking_attention_forward
from crosshead.modeling.ops import split_heads

from .case import SEED
from .pairs import Run

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention function: query, key and value (B, heads, T, d) -> outputs (B, T, H, d)."""
UNCACHED_BYTES = 2**28
"""Size in bytes of the keys and values of all layers together: more than a processor's cache holds."""
PADDED, NORMED_KEYS, TWO_QUERIES = "padded", "normed keys", "two at once"
"""Kinds of decoding: with a padding mask, with keys that the backbone normalises, with two new tokens."""


def mixture_layer(
    ours: bool,
    tokens: int,
    heads: int,
    head_dim: int,
    active: int,
    shared: int,
    gradients: bool,
    padded: bool,
    published: bool,
) -> Run:
    """Attention of the selected heads, by random gates; the baseline is dense attention of all heads.

    With `padded`, a mask hides the first keys. `published` uses the attention function in the code of a published
    model, which runs without crosshead.
    """
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril() if padded else None
    if mask is not None:
        mask[..., : tokens // 16] = False
    if not ours:
        return attention_run(partial(dense_attention, mask=mask), tokens, heads, head_dim, gradients)
    options = {"active_heads": active, "shared_heads": shared, "router": "query_norm"}
    mixture = build_mechanism("mixture", HeadLayout(heads * head_dim, heads, heads, head_dim), **options)
    gates = random_gates(tokens, heads, active, shared)
    function = mixture_attention_forward if published else None

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        state = AttentionState(query, key, query, key, value, gates=gates)
        return mechanism_attention(mixture, state, mask, _implementation("mixture", query, published), function)

    return attention_run(attend, tokens, heads, head_dim, gradients)


def random_gates(tokens: int, heads: int, active: int, shared: int) -> Tensor:
    """Return gates (1, T, H): 1 for a token's active heads, which include the first `shared` heads, otherwise 0."""
    torch.manual_seed(SEED)
    scores = torch.rand(1, tokens, heads)
    scores[..., :shared] = 2.0
    return torch.zeros_like(scores).scatter(-1, scores.topk(active, dim=-1).indices, 1.0)


def talking_layer(
    ours: bool, against: str, tokens: int, heads: int, head_dim: int, gradients: bool, published: bool
) -> Run:
    """Talking-heads attention in blocks, with random head maps; the baseline `against` is eager, or sdpa without maps.

    `published` uses the attention function in the code of a published model, which runs without crosshead.
    """
    if not ours and against == "sdpa":
        return attention_run(dense_attention, tokens, heads, head_dim, gradients)
    torch.manual_seed(SEED)
    talking = build_mechanism("talking", HeadLayout(heads * head_dim, heads, heads, head_dim))
    for head_map in talking.parameters():
        torch.nn.init.normal_(head_map, std=heads**-0.5)
    function = talking_attention_forward if published else None

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        state = AttentionState(query, key, query, key, value)
        if not ours:
            mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=query.device).tril()
            return mechanism_attention(talking, state, mask, "eager")
        return mechanism_attention(talking, state, None, _implementation("talking", query, published), function)

    return attention_run(attend, tokens, heads, head_dim, gradients, talking.parameters())


def explicit_decoding(
    ours: bool, query_heads: int, key_value_heads: int, head_dim: int, tokens: int, batch: int, kind: str = ""
) -> Run:
    """One decoding step with half as many component heads as KV heads: attention of the last one or two queries."""
    torch.manual_seed(SEED)
    query = torch.randn(batch, query_heads, 2 if kind == TWO_QUERIES else 1, head_dim)
    heads = key_value_heads // 2 if ours else key_value_heads
    layers = uncached_layers(batch, heads, tokens, head_dim, baseline_heads=key_value_heads, by_token=ours)
    eps = 1e-6 if kind == NORMED_KEYS else None
    layout = HeadLayout(query_heads * head_dim, query_heads, key_value_heads, head_dim, key_norm_eps=eps)
    explicit = build_mechanism("explicit", layout, key_heads=heads, value_heads=heads, norm=False)
    for combination in explicit.parameters():
        torch.nn.init.normal_(combination)
    scales = torch.rand(batch, tokens, key_value_heads if kind == NORMED_KEYS else 0)
    key_side_data = {"explicit.inverse_rms": scales} if kind == NORMED_KEYS else {}
    mask = _decoding_mask(kind, tokens, batch)

    @torch.no_grad()
    def attend() -> object:
        key, value = next(layers)
        if not ours:
            return stock_attention(query, key, value, mask)
        return mechanism_attention(
            explicit, AttentionState(query, query, query, key, value, key_side_data=key_side_data), mask
        )

    return attend


def _decoding_mask(kind: str, tokens: int, batch: int) -> Tensor | None:
    """Return a mask (batch, 1, queries, tokens), or None if each query sees all keys."""
    keys = torch.arange(tokens)
    if kind == TWO_QUERIES:
        return (keys <= torch.tensor([[tokens - 2], [tokens - 1]])).expand(batch, 1, -1, -1)
    return (keys >= tokens // 16).expand(batch, 1, 1, -1) if kind == PADDED else None


def uncached_layers(
    batch: int, heads: int, tokens: int, head_dim: int, baseline_heads: int, by_token: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Cycle through keys and values of many layers, so that the next ones are never in the processor's cache.

    The number of layers follows from `baseline_heads`, so that both sides have the same number. `by_token` stores the
    heads of a token next to each other.
    """
    itemsize = torch.get_default_dtype().itemsize
    layers = max(1, -(-UNCACHED_BYTES // (2 * batch * baseline_heads * tokens * head_dim * itemsize)))

    def states() -> Tensor:
        tensor = split_heads(torch.randn(batch, tokens, heads * head_dim), head_dim)
        return tensor if by_token else tensor.contiguous()

    return cycle([(states(), states()) for _ in range(layers)])


def attention_run(
    attend: Attend, tokens: int, heads: int, head_dim: int, gradients: bool, parameters: Iterable[Tensor] = ()
) -> Run:
    """Return a run that calls `attend`; with `gradients`, also its backward pass to the inputs and `parameters`."""
    torch.manual_seed(SEED)
    inputs = [torch.randn(1, heads, tokens, head_dim, requires_grad=gradients) for _ in range(3)]
    output_gradient = torch.randn(1, tokens, heads, head_dim)
    differentiated = [*inputs, *parameters]
    if gradients:
        return lambda: torch.autograd.grad(attend(*inputs), differentiated, output_gradient)
    return torch.no_grad()(partial(attend, *inputs))


def dense_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return attention outputs of torch's fastest kernel; causal if there is no mask."""
    return scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None).transpose(1, 2)


def stock_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Return outputs of the sdpa attention of a stock model, in which query heads may share keys.

    Without a mask, the kernel shares the keys, which is slow on a CPU. With a mask and one query, query heads that
    share keys become queries of one head, which takes about half the time. With several queries, keys are repeated.
    """
    return sdpa_attention_forward(_layer(query, key), query, key, value, mask, scaling=query.shape[-1] ** -0.5)[0]


def build_mechanism(name: str, layout: HeadLayout, **options: Any) -> Mechanism:
    """Build a mechanism as the only one of a layer, in evaluation mode."""
    settings = layer_settings(complete_mixers({name: options}, [layout]), 0)
    return MECHANISMS[name](shared_layout(settings, layout), settings[name]).eval()


def mechanism_attention(
    mechanism: Mechanism,
    state: AttentionState,
    mask: Tensor | None,
    implementation: str = "sdpa",
    function: Callable[..., tuple[Tensor, Tensor | None]] | None = None,
) -> Tensor:
    """Return the attention outputs of a layer with only this mechanism, causal if there is no mask.

    `function` replaces the registered attention function.
    """
    state.function = mechanism.attention_function(state, implementation, mask is not None)
    mechanism.after_cache(state)
    function = function or ALL_ATTENTION_FUNCTIONS[state.function or implementation]
    options = {"dropout": 0.0, "scaling": state.query.shape[-1] ** -0.5, **state.attention_kwargs}
    return function(_layer(state.query, state.key), state.query, state.key, state.value, mask, **options)[0]


def _layer(query: Tensor, key: Tensor) -> Any:
    """Return the fields of an attention module that attention functions read."""
    return SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], is_causal=True, training=False)


def _implementation(name: str, query: Tensor, published: bool) -> str:
    """Return the attention implementation: the mechanism's Triton kernels on a GPU, otherwise sdpa."""
    return f"crosshead_{name}_triton" if query.is_cuda and not published else "sdpa"
