"""One attention call, of a mechanism or of the library, on random queries, keys and values."""

from collections.abc import Callable, Iterable, Iterator
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from crosshead.modeling.cache import split_heads
from crosshead.modeling.mechanisms.base import AttentionCall, HeadStates, Mixer

from .bench_pairs import Run

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From query, key and value (B, heads, T, d) to outputs (B, T, H, d)."""
SEED = 0
COLD_BYTES = 2**28
"""Of the rival's keys and values, in all turns together: more than a processor's cache holds."""


def attention(
    attend: Attend,
    tokens: int,
    heads: int,
    head_dim: int,
    gradients: bool,
    parameters: Iterable[torch.Tensor] = (),
) -> Run:
    """The call, or the call and the gradients of its inputs and parameters; the same inputs whoever attends."""
    torch.manual_seed(SEED)
    inputs = [torch.randn(1, heads, tokens, head_dim, requires_grad=gradients) for _ in range(3)]
    given = torch.randn(1, tokens, heads, head_dim)
    wanted = [*inputs, *parameters]

    def forward() -> object:
        with torch.no_grad():
            return attend(*inputs)

    def forward_and_backward() -> object:
        return torch.autograd.grad(attend(*inputs), wanted, given)

    return forward_and_backward if gradients else forward


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """torch's own attention, causal or under a mask, by the fastest kernel it has for this."""
    return scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None).transpose(1, 2)


def stock(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """As a stock model attends with "sdpa": query heads may share keys."""
    layer: Any = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], is_causal=True)
    return sdpa_attention_forward(layer, query, key, value, mask, scaling=query.shape[-1] ** -0.5)[0]


def layers_in_turn(
    batch: int, heads: int, tokens: int, head_dim: int, rivals: int, side_by_side: bool = False
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of as many layers as are cold by the time that their turn comes again, as in a model.

    `rivals` are the heads of the rival, which has as many layers; `side_by_side` is how a token's heads lie.
    """
    held = torch.get_default_dtype().itemsize
    turns = max(1, -(-COLD_BYTES // (2 * batch * rivals * tokens * head_dim * held)))

    def made() -> torch.Tensor:
        if side_by_side:
            return split_heads(torch.randn(batch, tokens, heads * head_dim), heads)
        return torch.randn(batch, heads, tokens, head_dim)

    return cycle([(made(), made()) for _ in range(turns)])


def mixed(mixer: Mixer, states: HeadStates, mask: torch.Tensor | None = None, eager: bool = False) -> torch.Tensor:
    """As a layer with this mechanism alone attends; without a mask, each query sees the keys up to its own."""

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, None]:
        return stock(query, key, value, mask), None

    call = AttentionCall(run, eager, mask, states.query.shape[-1] ** -0.5, 0.0, plain=not eager)
    attended = None if mixer.owns_attention else mixer.attend_cached(states, call)
    if attended is None:
        mixer.on_cached(states)
        attended = mixer.attend(states, call) or run(states.query, states.key, states.value)
    return attended[0]
