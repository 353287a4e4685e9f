"""Attention for chosen queries alone: exact, and faster than all of it where enough are left out.

On a GPU `routed_triton` does it where asked for; this file has the way of CPUs, and says when either pays.

The chosen queries of the heads that read one key/value head form one list, in the order of the tokens. A block of that
list meets the keys that any of its queries sees, and few others: its scores are one small matrix, made by one large
product, with a softmax in place, so that hardly any of the work is the machinery's. Where products are not quick,
torch's own kernel takes heads that are chosen alike together (`triangle_attention.py`), and of others a block
(`joined_attention.py`). The fewer the rows of a block, the less is computed only to be hidden. The backward pass makes
the weights again: memory is linear in the length.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from .eager import repeat_heads
from .joined_attention import joined_attention
from .mixer import AttentionCall
from .quick_products import is_quicker, product
from .traced import traced, transformed
from .triangle_attention import attended_together
from .visible_keys import VisibleKeys
from .where_triton_runs import MOST_FEATURES, runs_triton

ROWS = 128
"""Queries of a block: more meet more keys in vain, fewer make the products too small (64 to 192 differ by 3%)."""
JOINED_ROWS = 256
"""The same where torch's kernel takes a block, which divides it further."""
LEAST_QUERIES = 1024
"""From here on the products that are saved are worth more than the steps that are added, on several cores too."""
GREATEST_SHARE = 0.75
"""Of the queries that are chosen; above, a dense kernel is done with all no later than this with its part."""
LEAST_QUERIES_OF_MANY, MANY = 2048, 0.55
"""Where products are not quick and a greater share is chosen, more queries have to be left out to be worth it."""
LEAST_QUERIES_OF_GPU = 2048
"""The same on a GPU, where a short call is over before its kernels are all started; a guess that awaits measuring."""
DTYPES = (torch.float32, torch.float64)
"""Half precision has dense kernels that keep the scores wide; these products would round them."""


def pays(query: torch.Tensor, key: torch.Tensor, share: float, call: AttentionCall) -> bool:
    """Whether `routed_attention` gives what the call's backend would, and sooner, where `share` of queries count."""
    if not call.plain or call.dropout or share > GREATEST_SHARE:
        return False
    masks = (1, query.shape[2], key.shape[2])
    if call.mask is not None and (call.mask.dtype != torch.bool or call.mask.shape[1:] != masks):
        return False
    if transformed():
        return False
    if runs_triton(query):
        return query.shape[2] >= LEAST_QUERIES_OF_GPU and query.shape[3] <= MOST_FEATURES
    if traced() or torch.is_autocast_enabled("cpu"):
        return False  # a graph cannot depend on how many queries count; autocast would round the products
    least = LEAST_QUERIES if share <= MANY or _has_quick_products(query) else LEAST_QUERIES_OF_MANY
    return query.device.type == "cpu" and query.dtype in DTYPES and query.shape[2] >= least


def routed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chosen: torch.Tensor, shared: int, call: AttentionCall
) -> torch.Tensor:
    """Outputs (B, T, H, d) of the chosen (B, T, H) queries; zeros elsewhere, and where a query sees no key.

    Of the first `shared` heads every query is chosen.
    """
    if runs_triton(query):
        from .routed_triton import attend_chosen

        mask = None if call.mask is None else call.mask[:, 0]
        return attend_chosen(query, key, value, chosen, mask, call.scaling, call.causal)
    mask = None
    if call.mask is not None:
        mask = call.mask[:, 0].expand(query.shape[0], -1, -1)
        chosen = chosen & mask.any(-1, keepdim=True)
    unit = ROWS if _has_quick_products(query) else None
    seen = VisibleKeys(mask, call.causal, key.shape[2], unit)
    output: torch.Tensor = RoutedAttention.apply(query, key, value, chosen, shared, seen, call.scaling)
    return output


def _has_quick_products(query: torch.Tensor) -> bool:
    """Training has no memory for their kernels."""
    return is_quicker(query) and not torch.is_grad_enabled()


@dataclass(frozen=True)
class Block:
    """Some of the queries of a group, and the keys that they meet."""

    rows: slice
    keys: slice
    tokens: torch.Tensor
    first: int
    """The first of the tokens."""


@dataclass(frozen=True)
class Group:
    """The chosen queries that read one key/value head of one sequence, in the order of their tokens."""

    sequence: int
    head: int
    """Of the keys and values."""
    within: torch.Tensor
    """The place of each among all queries that read this head, (T, H / heads) of them."""
    overall: torch.Tensor
    """The place of each among all queries, (B, T, H)."""
    blocks: list[Block]


def groups(chosen: torch.Tensor, heads: range, size: int, visible: VisibleKeys, rows: int) -> Iterator[Group]:
    """Those that hold anything, by `chosen` (B, T, H), for some key/value heads that `size` query heads read each.

    A block has so many rows.
    """
    sequences, length, count = chosen.shape
    for sequence in range(sequences):
        for head in heads:
            tokens, reader = chosen[sequence, :, head * size : (head + 1) * size].nonzero().unbind(1)
            if len(tokens):
                overall = (sequence * length + tokens) * count + head * size + reader
                yield Group(sequence, head, tokens * size + reader, overall, _blocks(tokens, sequence, visible, rows))


def _blocks(tokens: torch.Tensor, sequence: int, visible: VisibleKeys, size: int) -> list[Block]:
    found, at = [], tokens.tolist()
    for start in range(0, len(at), size):
        rows = slice(start, min(start + size, len(at)))
        keys = visible.span(sequence, at[start], at[rows.stop - 1])
        found.append(Block(rows, keys, tokens[rows], at[start]))
    return found


class RoutedAttention(torch.autograd.Function):
    """Softmax attention of the chosen queries: (B, H, T, d) with keys and values (B, heads, S, d) -> (B, T, H, d)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        chosen: torch.Tensor,
        shared: int,
        visible: VisibleKeys,
        scaling: float,
    ) -> torch.Tensor:
        """Group by group; without a mask, whose hidden keys it would not skip, a dense kernel does the whole heads."""
        ctx.save_for_backward(query, key, value, chosen)
        ctx.visible, ctx.scaling = visible, scaling
        heads, size = key.shape[1], query.shape[1] // key.shape[1]
        output = value.new_zeros(*chosen.shape, value.shape[-1])
        whole = shared // size if visible.mask is None else 0
        if whole:
            found = _dense(query[:, : whole * size], key[:, :whole], value[:, :whole], visible, scaling)
            output[:, :, : whole * size] = found.transpose(1, 2)
        joins = visible.unit is None and visible.mask is None and query.shape[-1] == value.shape[-1]
        if joins:
            chosen = attended_together(query, key, value, chosen, whole, visible.causal, scaling, output)
        rows, attended = (JOINED_ROWS, _joined) if joins else (ROWS, _weighted)
        for group in groups(chosen, range(whole, heads), size, visible, rows):
            q, k, v = _taken(query, key, value, group, scaling)
            found = v.new_empty(len(q), v.shape[-1])
            for block in reversed(group.blocks):  # the largest first, whose memory the others use again
                found[block.rows] = attended(q, k, v, group, block, visible)
            output.view(-1, value.shape[-1]).index_copy_(0, group.overall, found)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Group by group, with the weights made again."""
        query, key, value, chosen = ctx.saved_tensors
        heads, size = key.shape[1], query.shape[1] // key.shape[1]
        gradient = gradient.reshape(-1, value.shape[-1])
        to_query = query.new_zeros(*chosen.shape, query.shape[-1])
        to_key, to_value = key.new_zeros(key.shape), value.new_zeros(value.shape)
        for group in groups(chosen, range(heads), size, ctx.visible, ROWS):
            q, k, v = _taken(query, key, value, group, ctx.scaling)
            given, found = gradient.index_select(0, group.overall), torch.empty_like(q)
            to_k, to_v = to_key[group.sequence, group.head], to_value[group.sequence, group.head]
            for block in reversed(group.blocks):  # the largest first, whose memory the others use again
                weights = _weights(q, k, group, block, ctx.visible)
                to_v[block.keys].addmm_(weights.t(), given[block.rows])
                to_scores = torch.mm(given[block.rows], v[block.keys].t())
                torch._softmax_backward_data(to_scores, weights, -1, weights.dtype, grad_input=to_scores)
                torch.mm(to_scores, k[block.keys], out=found[block.rows])
                to_k[block.keys].addmm_(to_scores.t(), q[block.rows])
            to_query.view(-1, query.shape[-1]).index_copy_(0, group.overall, found.mul_(ctx.scaling))
        return to_query.transpose(1, 2), to_key, to_value, None, None, None, None


def _dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: VisibleKeys, scaling: float
) -> torch.Tensor:
    """All queries (B, H, T, d) of some heads."""
    keys = visible.span(0, 0, query.shape[2] - 1)
    key, value = (repeat_heads(x[:, :, keys], query.shape[1]) for x in (key, value))
    return functional.scaled_dot_product_attention(query, key, value, is_causal=visible.causal, scale=scaling)


def _taken(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: Group, scaling: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A group's queries, scaled, and all keys and values of its head."""
    size = query.shape[1] // key.shape[1]
    readers = query[group.sequence, group.head * size : (group.head + 1) * size].transpose(0, 1).flatten(0, 1)
    k, v = (x[group.sequence, group.head].contiguous() for x in (key, value))
    return readers.index_select(0, group.within).mul_(scaling), k, v


def _joined(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group, block: Block, visible: VisibleKeys
) -> torch.Tensor:
    """Outputs of a block without a mask, by torch's kernel."""
    behind = visible.behind(block.tokens, block.first, block.keys)
    common = block.keys.stop if behind is None else block.first + 1
    return joined_attention(q[block.rows], k[block.keys], v[block.keys], common, behind)


def _weighted(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group, block: Block, visible: VisibleKeys
) -> torch.Tensor:
    """Outputs of a block by its weights, and by quick products where there are any."""
    multiply = functional.linear if visible.unit is None else product
    return multiply(_weights(q, k, group, block, visible, multiply), v[block.keys].t())


def _weights(
    q: torch.Tensor,
    k: torch.Tensor,
    group: Group,
    block: Block,
    visible: VisibleKeys,
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = functional.linear,
) -> torch.Tensor:
    """What a block's queries give to its keys."""
    scores = multiply(q[block.rows], k[block.keys])
    visible.hide(scores, group.sequence, block.tokens, block.first, block.keys)
    return torch.softmax(scores, dim=-1, out=scores)
