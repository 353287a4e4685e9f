"""Talking-Heads attention in memory linear in the sequence length: one block of queries at a time.

The logits and weights of a block are in buffers that the next block reuses; the backward pass recomputes them. All
blocks are one custom operator, because `torch.compile` would unroll the loop over blocks again for each length. Its
name contains the module's, because each copy of this code in a process (one per saved model) registers its own.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils.generic import maybe_autocast

from ..ops import widened

TALKING_CPU_BLOCKS = (2**23, 2**18, 16, 64)
"""Block sizes on the CPU: elements in all buffers, elements up to which sequences share a block, minimum and maximum
queries per sequence. Timed with 16 heads and 4,096 tokens; shared blocks with 4 heads and 32 tokens."""
TALKING_GPU_BLOCKS = (2**28, 2**28, 16, 128)
"""Like TALKING_CPU_BLOCKS, for other devices: 1 GB in float32, 16 blocks for 8 x 2,048 tokens, 32 heads. Untimed."""
TALKING_BUFFERS_FORWARD, TALKING_BUFFERS_BACKWARD = 2, 4  # buffers, with an element for each head, query and key
TALKING_NAMESPACE = re.sub(r"\W", "_", ascii(__name__)[1:-1])  # torch takes only ASCII


@dataclass(frozen=True)
class TalkingBlock:
    """A range of queries in each sequence of a `TalkingPart`, and the range of keys that they attend to."""

    queries: slice
    keys: slice
    has_masked_rows: bool = False  # a boolean mask may hide all keys from a query: uniform weights, no gradient

    def rows(self, x: Tensor) -> Tensor:
        """View (sequences x queries, ...) as (sequences, queries, ...)."""
        return x.view(-1, self.queries.stop - self.queries.start, *x.shape[1:])

    def by_head(self, x: Tensor) -> Tensor:
        """Return (sequences x queries, heads, keys) as (heads x sequences, queries, keys), a view if possible."""
        return self.rows(x).permute(2, 0, 1, 3).flatten(0, 1)

    def query_part(self, x: Tensor) -> Tensor:
        """Return the part of (sequences, T or 1, ...) for the queries of the block."""
        return x[:, self.queries] if x.shape[1] > 1 else x


@dataclass(frozen=True)
class TalkingMaps:
    """Maps of queries (sequences or 1, T or 1, to, from) and keys (sequences, S, to, from), or their gradients."""

    by_query: Tensor
    by_key: Tensor | None

    def apply(self, block: TalkingBlock, x: Tensor, out: Tensor, transpose: bool = False) -> Tensor:
        """Map (sequences x queries, from, keys) across heads into `out`; for gradients, `transpose` the maps."""
        rows = block.rows(x)
        maps = block.query_part(self.by_query).expand(*rows.shape[:2], -1, -1).flatten(0, 1)
        torch.bmm(maps.mT if transpose else maps, x, out=out)
        if self.by_key is not None:
            equation = "nsji,nmjs->nmis" if transpose else "nsij,nmjs->nmis"
            block.rows(out).add_(torch.einsum(equation, self.by_key[:, block.keys], rows))
        return out

    def add(self, block: TalkingBlock, grad: Tensor, x: Tensor) -> None:
        """Add the gradients of maps that were applied to `x` and whose result has the gradient `grad`."""
        total = block.query_part(self.by_query)
        total += block.rows(torch.bmm(grad, x.mT)).sum_to_size(total.shape)
        if self.by_key is not None:
            self.by_key[:, block.keys] += torch.einsum("nmis,nmjs->nsij", block.rows(grad), block.rows(x))


class TalkingPart:
    """The sequences of a call that share blocks, and the computation of these blocks.

    Queries, keys and values are (heads x sequences, tokens, features), so that one batched product computes all heads
    and sequences. Logits and weights are (sequences x queries, heads, keys), for the batched product with maps.
    """

    def __init__(self, tensors: Sequence[Any], items: slice, size: int, memory: Tensor, causal: bool) -> None:
        query, key, value = (x[items] for x in tensors[:3])
        *maps, mask = talking_items(tensors[3:], items)
        self.items, self.sequences, self.size, self.memory = items, len(query), size, memory
        self.query = talking_by_head(query, query.shape[1])
        self.key, self.value = talking_by_head(key, query.shape[1]), talking_by_head(value, maps[2].shape[2])
        self.logits_maps, self.weights_maps = TalkingMaps(*maps[:2]), TalkingMaps(*maps[2:])
        self.mask = None if mask is None else mask.transpose(1, 2)  # (sequences or 1, T or 1, heads or 1, S)
        self.triangle = query.new_ones(size, size, dtype=torch.bool).tril() if mask is None and causal else None
        self.lowest, self.zero = memory.new_full((), torch.finfo(memory.dtype).min), memory.new_zeros(())

    def blocks(self) -> Iterator[TalkingBlock]:
        """Yield all blocks. On the CPU, the mask limits a block's keys; on a GPU, reading it would synchronise."""
        tokens, keys = self.query.shape[1], self.key.shape[1]
        for start in range(0, tokens, self.size):
            queries = slice(start, min(start + self.size, tokens))
            visible = slice(0, keys if self.triangle is None else min(queries.stop, keys))
            masked_rows = self.mask is not None and self.mask.dtype == torch.bool
            if self.mask is not None and self.mask.device.type == "cpu":
                visible, masked_rows = talking_mask_span(TalkingBlock(queries, visible).query_part(self.mask))
            yield TalkingBlock(queries, visible, masked_rows)

    def take(self, index: int, block: TalkingBlock, heads: int, by_head: bool = False) -> Tensor:
        """Return buffer `index` as (sequences x queries, heads, keys), stored heads first if `by_head`."""
        rows, keys = self.sequences * (block.queries.stop - block.queries.start), block.keys.stop - block.keys.start
        buffer = self.memory[index, : heads * rows * keys]
        return buffer.view(heads, rows, keys).transpose(0, 1) if by_head else buffer.view(rows, heads, keys)

    def products(self, index: int, block: TalkingBlock, rows: Tensor, columns: Tensor) -> Tensor:
        """Return products (sequences x queries, heads, keys) of query rows and key columns, in buffer `index`."""
        rows, columns = rows[:, block.queries], columns[:, block.keys].mT
        out = self.take(index, block, len(rows) // self.sequences, by_head=True)
        if rows.dtype == out.dtype:
            torch.bmm(rows, columns, out=block.by_head(out))
        else:
            block.by_head(out).copy_(torch.bmm(rows, columns))
        return out

    def hide(self, block: TalkingBlock, logits: Tensor, lowest: Tensor) -> None:
        """Apply the mask in place: a boolean mask writes `lowest` at hidden keys, an additive mask is added."""
        logits = block.rows(logits)
        visible = None if self.mask is None else block.query_part(self.mask)[..., block.keys]
        if self.triangle is not None:
            logits = logits[..., block.queries.start :]
            visible = self.triangle[: logits.shape[1], None, : logits.shape[3]]
        if visible is not None and visible.dtype == torch.bool:
            torch.where(visible, logits, lowest, out=logits)
        elif visible is not None:
            logits += visible

    def weights(self, block: TalkingBlock, logits: Tensor, index: int) -> Tensor:
        """Return the weights before the second map, in buffer `index`; buffer 1 is overwritten."""
        out = self.take(1, block, self.logits_maps.by_query.shape[2])
        self.hide(block, self.logits_maps.apply(block, logits, out), self.lowest)
        return torch.softmax(out, dim=-1, out=self.take(index, block, out.shape[1]))

    def mix(self, maps: TalkingMaps, block: TalkingBlock, x: Tensor, transpose: bool = False) -> Tensor:
        """Apply maps in buffer 1, and return (heads x sequences, queries, keys) in the dtype of the values."""
        out = self.take(1, block, maps.by_query.shape[3 if transpose else 2], by_head=self.sequences > 1)
        return block.by_head(maps.apply(block, x, out, transpose)).to(self.value.dtype)

    def attend(self, output: Tensor) -> None:
        """Write the attention outputs (sequences, T, heads, features) to `output`."""
        heads = output.permute(2, 0, 1, 3)
        out = heads[:, 0] if self.sequences == 1 else heads.new_empty(len(self.value), *heads.shape[2:])
        for block in self.blocks():
            weights = self.weights(block, self.products(0, block, self.query, self.key), 0)
            mixed = self.mix(self.weights_maps, block, weights)
            torch.bmm(mixed, self.value[:, block.keys], out=out[:, block.queries])
        if self.sequences > 1:
            heads.copy_(out.view(heads.shape))

    def add_gradients(self, output: Tensor, sums: Sequence[Any]) -> None:
        """Add to `sums` the gradients of queries, keys, values and both maps, from output gradients `output`."""
        query, key, value, logits, weights = sums
        for block in self.blocks():
            scores = self.products(0, block, self.query, self.key)
            attention = self.weights(block, scores, 2)
            mixed = self.mix(self.weights_maps, block, attention)
            talking_add_products(value[:, block.keys], mixed.mT, output[:, block.queries])
            grad = self.products(1, block, output, self.value)  # of the mixed weights
            weights.add(block, grad, attention)
            grad = self.weights_maps.apply(block, grad, self.take(3, block, attention.shape[1]), transpose=True)
            product = torch.mul(grad, attention, out=self.take(1, block, attention.shape[1]))
            torch.addcmul(product, attention, product.sum(-1, keepdim=True), value=-1, out=grad)  # of the mixed logits
            if block.has_masked_rows:
                self.hide(block, grad, self.zero)
            logits.add(block, grad, scores)
            mixed = self.mix(self.logits_maps, block, grad, transpose=True)
            talking_add_products(query[:, block.queries], mixed, self.key[:, block.keys])
            talking_add_products(key[:, block.keys], mixed.mT, self.query[:, block.queries])


def talking_items(tensors: Sequence[Tensor | None], items: slice) -> list[Any]:
    """Select some sequences from tensors (B or 1, ...), which are shared by all sequences if 1."""
    return [x if x is None or len(x) == 1 else x[items] for x in tensors]


def talking_by_head(x: Tensor, heads: int) -> Tensor:
    """Repeat grouped heads: (sequences, groups, tokens, features) -> (heads x sequences, tokens, features)."""
    sequences, groups, tokens, features = x.shape
    copies = x.transpose(0, 1).unsqueeze(1).expand(groups, heads // groups, sequences, tokens, features)
    return copies.reshape(heads * sequences, tokens, features).contiguous()


def talking_mask_span(mask: Tensor) -> tuple[slice, bool]:
    """Return the slice of keys that rows of a mask (..., keys) see, all if a row sees none; and `has_masked_rows`."""
    visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    if not visible.any(-1).all():
        return slice(0, mask.shape[-1]), mask.dtype == torch.bool
    columns = visible.flatten(0, -2).any(0).nonzero()
    return slice(int(columns[0]), int(columns[-1]) + 1), False


def talking_add_products(total: Tensor, maps: Tensor, rows: Tensor) -> None:
    """Add the batched products of maps and rows to `total`, which may have a wider dtype."""
    if rows.dtype == total.dtype:
        total.baddbmm_(maps, rows)
    else:
        total += torch.bmm(maps, rows)


def talking_block_size(device: str, batch: int, queries: int, row: int) -> tuple[int, int]:
    """Return (sequences per block, queries per sequence), given `row`, the buffer elements for one query."""
    elements, shared_elements, minimum, maximum = TALKING_CPU_BLOCKS if device == "cpu" else TALKING_GPU_BLOCKS
    size = min(queries, max(minimum, min(maximum, elements // row)))
    return max(1, min(batch, shared_elements // (row * size))), size


def talking_parts(call: Sequence[Any], scaling: float, causal: bool, buffers: int) -> Iterator[TalkingPart]:
    """Yield the sequences of a call in parts, which all use the same memory of `buffers` buffers."""
    tensors = [*call[:3], *(x if x is None else x * scaling for x in call[3:5]), *call[5:]]
    (batch, _, queries, _), keys = tensors[0].shape, tensors[1].shape[2]
    row = keys * max(*tensors[3].shape[2:], *tensors[5].shape[2:])
    sequences, size = talking_block_size(tensors[0].device.type, batch, queries, buffers * row)
    memory = tensors[0].new_empty(buffers, sequences * size * row, dtype=widened(tensors[0].dtype))
    for start in range(0, batch, sequences):
        yield TalkingPart(tensors, slice(start, start + sequences), size, memory, causal)


def talking_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    logits_map: Tensor,
    logits_key_map: Tensor | None,
    weights_map: Tensor,
    weights_key_map: Tensor | None,
    mask: Tensor | None,
    scaling: float,
    causal: bool,
) -> Tensor:
    """Return outputs (B, T, heads, n) of queries (B, H, T, d), keys (B, groups, S, d) and values (B, groups, S, n).

    Maps are (B or 1, T or 1, to, from), key maps (B, S, to, from), in the widened dtype. The mask is (B or 1,
    softmax heads or 1, T or 1, S), boolean with True for visible keys, or additive. Without it, if `causal`, query `t`
    sees keys up to `t`. A query that sees no key has equal weights for all keys, as in eager attention.
    """
    tensors = [query, key, value, logits_map, logits_key_map, weights_map, weights_key_map, mask]
    output = talking_fake(query, key, value, *tensors[3:])
    with maybe_autocast(query.device.type, enabled=False):
        for part in talking_parts(tensors, scaling, causal, TALKING_BUFFERS_FORWARD):
            part.attend(output[part.items])
    return output


def talking_backward(
    grad_output: Tensor, tensors: Sequence[Tensor | None], scaling: float, causal: bool
) -> list[Tensor]:
    """Return gradients of all tensors but the mask; of maps in the widened dtype, and empty without a map."""
    totals = talking_gradients_fake(grad_output, tensors)
    with maybe_autocast(grad_output.device.type, enabled=False):
        for part in talking_parts(tensors, scaling, causal, TALKING_BUFFERS_BACKWARD):
            output = talking_by_head(grad_output[part.items].transpose(1, 2), grad_output.shape[2])
            maps = talking_items([x if x.numel() else None for x in totals[3:]], part.items)
            parts, wide = [x[part.items] for x in totals[:3]], part.memory.dtype
            heads = (part.query, part.key, part.value)
            direct = [x.dtype == wide and x.shape[:2] == (1, len(y)) for x, y in zip(parts, heads, strict=True)]
            triples = zip(parts, heads, direct, strict=True)  # one sequence with all heads: its sums need no copy
            sums = [x[0].zero_() if is_direct else torch.zeros_like(y, dtype=wide) for x, y, is_direct in triples]
            part.add_gradients(output, [*sums, TalkingMaps(*maps[:2]), TalkingMaps(*maps[2:])])
            for total, part_sum, is_direct in zip(parts, sums, direct, strict=True):
                groups = part_sum.view(total.shape[1], -1, part.sequences, *total.shape[2:])
                if not is_direct:
                    total.copy_(groups.sum(1).transpose(0, 1))
    for total in totals[3:5]:  # gradients of maps that the scaling was multiplied into
        total *= scaling
    return totals


def talking_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    """Return an uninitialised output (B, T, heads, features)."""
    return value.new_empty(query.shape[0], query.shape[2], rest[2].shape[2], value.shape[3])


def talking_gradients_fake(grad_output: Tensor, tensors: Sequence[Any], *rest: Any) -> list[Tensor]:
    """Return gradient tensors to fill: uninitialised for queries, keys and values, zero for maps."""
    wide = widened(tensors[0].dtype)
    maps = (tensors[0].new_zeros(0 if x is None else x.shape, dtype=wide) for x in tensors[3:7])
    return [*(torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors[:3]), *maps]


def talking_keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save the inputs for the backward pass."""
    ctx.save_for_backward(*inputs[:8])
    ctx.rest = inputs[8:]


def talking_autograd(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of all inputs, None for those that need none."""
    grads = talking_gradients(grad_output, ctx.saved_tensors, *ctx.rest)
    results = [grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False)]
    return (*results, None, None, None)


talking_blocks = torch.library.custom_op(f"{TALKING_NAMESPACE}::talking", talking_forward, mutates_args=())
talking_gradients = torch.library.custom_op(f"{TALKING_NAMESPACE}::talking_grad", talking_backward, mutates_args=())
talking_blocks.register_fake(talking_fake)
talking_gradients.register_fake(talking_gradients_fake)
talking_blocks.register_autograd(talking_autograd, setup_context=talking_keep)
