"""Talking-Heads attention in memory linear in the sequence length: one block of queries at a time.

A block has queries of one or several sequences. Its logits and weights lie in memory that the next block uses again;
the backward pass computes them anew. The whole is one operator, because `torch.compile` would unroll the loop over
blocks, anew for each length. Its name contains that of this module, because each copy of this code that a process
loads, with a published model, needs an operator of its own.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils.generic import maybe_autocast

from ..ops import widened

TALKING_CPU_NUMBERS, TALKING_CPU_QUERIES = 2**23, (16, 64)
"""On the CPU: numbers in all that is held of a block, fewest and most queries of it. Measured with 16 heads and 4,096
tokens on two cores: larger blocks leave the cache, smaller ones cost more in calls than in products."""
TALKING_GPU_NUMBERS, TALKING_GPU_QUERIES = 2**26, (16, 128)
"""On other devices: numbers in one tensor of a block (256 MB in float32), queries of each sequence in it. Chosen by
counted launches, 8 sequences of 2,048 tokens with 32 heads: 16 blocks; not timed on a GPU."""
TALKING_HELD_FORWARD, TALKING_HELD_BACKWARD = 2, 4
"""Tensors with a number for each head, query and key of a block that a pass holds at a time."""
TALKING_NAMESPACE = re.sub(r"\W", "_", __name__)


@dataclass(frozen=True)
class TalkingBlock:
    """Some queries of each sequence, and the keys that they meet."""

    queries: slice
    keys: slice
    blind: bool
    """Whether some query may see no key; it then weighs every key alike."""

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """(sequences x queries, ...) as (sequences, queries, ...)."""
        return x.unflatten(0, (-1, self.queries.stop - self.queries.start))

    def query_part(self, x: torch.Tensor) -> torch.Tensor:
        """What (sequences, T or 1, ...) has for the queries."""
        return x[:, self.queries] if x.shape[1] > 1 else x

    def by_head(self, x: torch.Tensor) -> torch.Tensor:
        """(sequences x queries, heads, keys) as (heads x sequences, queries, keys)."""
        return self.rows(x).permute(2, 0, 1, 3).flatten(0, 1)


@dataclass(frozen=True)
class TalkingMaps:
    """Maps across heads of some sequences, or the sums of their gradients."""

    by_query: torch.Tensor
    """(sequences or 1, T or 1, to, from)."""
    by_key: torch.Tensor | None
    """(sequences, S, to, from): what each key adds."""

    def of(self, items: slice) -> "TalkingMaps":
        """The maps of some sequences."""
        by_query = self.by_query[items] if len(self.by_query) > 1 else self.by_query
        return TalkingMaps(by_query, None if self.by_key is None else self.by_key[items])

    def scaled(self, factor: float) -> "TalkingMaps":
        """The maps times a number."""
        return TalkingMaps(self.by_query * factor, None if self.by_key is None else self.by_key * factor)

    def turned(self) -> "TalkingMaps":
        """The transposed maps, which gradients go through."""
        return TalkingMaps(self.by_query.mT, None if self.by_key is None else self.by_key.mT)

    def apply(self, block: TalkingBlock, given: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Map (sequences x queries, from, keys) into `out`, (sequences x queries, to, keys)."""
        maps = block.query_part(self.by_query).expand(*block.rows(given).shape[:2], -1, -1).flatten(0, 1)
        torch.bmm(maps, given, out=out)
        if self.by_key is not None:
            block.rows(out).add_(torch.einsum("nsij,nmjs->nmis", self.by_key[:, block.keys], block.rows(given)))
        return out

    def add(self, block: TalkingBlock, grad: torch.Tensor, given: torch.Tensor) -> None:
        """Add the gradients of maps that were applied to `given`, from that of the result."""
        total = block.query_part(self.by_query)
        total += block.rows(torch.bmm(grad, given.mT)).sum_to_size(total.shape)
        if self.by_key is not None:
            self.by_key[:, block.keys] += torch.einsum("nmis,nmjs->nsij", block.rows(grad), block.rows(given))


@dataclass(frozen=True)
class TalkingCall:
    """The arguments of `talking_blocks`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    logits_map: torch.Tensor
    logits_key_map: torch.Tensor | None
    weights_map: torch.Tensor
    weights_key_map: torch.Tensor | None
    mask: torch.Tensor | None
    scaling: float
    causal: bool

    def heads(self) -> int:
        """The most of queries, softmax and outputs."""
        return max(*self.logits_map.shape[2:], *self.weights_map.shape[2:])

    def parts(self, held: int) -> Iterator[tuple[slice, "TalkingPart"]]:
        """Sequences that share blocks, by the tensors that are held of a block."""
        count, size = talking_block_size(self, held)
        numbers = self.heads() * count * size * self.key.shape[2]
        memory = self.query.new_empty(held, numbers, dtype=widened(self.query.dtype))
        for start in range(0, len(self.query), count):
            items = slice(start, min(start + count, len(self.query)))
            yield items, TalkingPart(self, items, size, memory)


def talking_block_size(call: TalkingCall, held: int) -> tuple[int, int]:
    """How many sequences share a block, and how many queries of each it has at most."""
    (batch, _, queries, _), row = call.query.shape, call.heads() * call.key.shape[2]
    if call.query.device.type == "cpu":  # one sequence: its block may fit the cache, and leaves out what it hides
        fewest, most = TALKING_CPU_QUERIES
        return 1, min(queries, max(fewest, min(most, TALKING_CPU_NUMBERS // (held * row))))
    fewest, most = TALKING_GPU_QUERIES
    size = min(queries, max(fewest, min(most, TALKING_GPU_NUMBERS // row)))
    return max(1, min(batch, TALKING_GPU_NUMBERS // (row * size))), size


def talking_side_by_side(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(sequences, groups, tokens, features) as (heads x sequences, tokens, features), copied for heads of a group."""
    count, groups, tokens, features = x.shape
    copies = x.transpose(0, 1).unsqueeze(1).expand(groups, heads // groups, count, tokens, features)
    return copies.reshape(heads * count, tokens, features).contiguous()


class TalkingPart:
    """Some sequences of a call, and what is computed of a block of their queries.

    Queries, keys and values lie as (heads x sequences, tokens, features), so that one batched product has all heads
    and sequences. Logits and weights are (sequences x queries, heads, keys), as a batched product with maps needs.
    """

    def __init__(self, call: TalkingCall, items: slice, size: int, memory: torch.Tensor) -> None:
        self.count, self.size, self.memory = items.stop - items.start, size, memory
        self.query = talking_side_by_side(call.query[items], call.query.shape[1])
        self.key = talking_side_by_side(call.key[items], call.query.shape[1])
        self.value = talking_side_by_side(call.value[items], call.weights_map.shape[2])
        logits_maps = TalkingMaps(call.logits_map, call.logits_key_map).of(items)
        self.logits_maps = logits_maps.scaled(call.scaling)
        self.weights_maps = TalkingMaps(call.weights_map, call.weights_key_map).of(items)
        self.mask = call.mask[items] if call.mask is not None and len(call.mask) > 1 else call.mask
        self.triangle = None
        if call.mask is None and call.causal:
            self.triangle = torch.ones(size, size, dtype=torch.bool, device=memory.device).tril()
        self.lowest, self.zero = memory.new_full((), torch.finfo(memory.dtype).min), memory.new_zeros(())

    def blocks(self) -> Iterator[TalkingBlock]:
        """All blocks. On the CPU the mask is read, to leave out keys that it hides from all queries of a block."""
        queries, keys = self.query.shape[1], self.key.shape[1]
        for start in range(0, queries, self.size):
            part = slice(start, min(start + self.size, queries))
            if self.mask is None:
                last = keys if self.triangle is None else min(part.stop, keys)
                yield TalkingBlock(part, slice(0, last), blind=False)
            elif self.mask.device.type == "cpu":
                yield TalkingBlock(part, *talking_mask_span(self.mask_part(part, slice(0, keys))))
            else:  # reading it would wait for the device
                yield TalkingBlock(part, slice(0, keys), blind=True)

    def mask_part(self, queries: slice, keys: slice) -> torch.Tensor:
        """The mask as (sequences or 1, queries or 1, heads or 1, keys)."""
        assert self.mask is not None
        mask = self.mask[:, :, queries] if self.mask.shape[2] > 1 else self.mask
        return mask[..., keys].transpose(1, 2)

    def take(self, index: int, block: TalkingBlock, heads: int, by_head: bool = False) -> torch.Tensor:
        """Memory for (sequences x queries, heads, keys), ordered by heads first where asked."""
        rows = self.count * (block.queries.stop - block.queries.start)
        shape = (heads, rows, -1) if by_head else (rows, heads, -1)
        taken = self.memory[index, : heads * rows * (block.keys.stop - block.keys.start)].view(shape)
        return taken.transpose(0, 1) if by_head else taken

    def products(self, index: int, block: TalkingBlock, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Products of rows (heads x sequences, queries, features) with columns of as many heads, of the keys."""
        found = self.take(index, block, len(rows) // self.count, by_head=True)
        out = block.by_head(found)
        if rows.dtype == out.dtype:
            torch.bmm(rows, columns.mT, out=out)
        else:
            out.copy_(torch.bmm(rows, columns.mT))
        return found

    def logits(self, block: TalkingBlock) -> torch.Tensor:
        """Logits before scaling and the first map, in memory 0."""
        return self.products(0, block, self.query[:, block.queries], self.key[:, block.keys])

    def weights(self, block: TalkingBlock, logits: torch.Tensor, index: int) -> torch.Tensor:
        """Weights before the second map, in memory of that index; memory 1 is used."""
        mixed = self.logits_maps.apply(block, logits, self.take(1, block, self.logits_maps.by_query.shape[2]))
        self.hide(block, block.rows(mixed), self.lowest)
        return torch.softmax(mixed, dim=-1, out=self.take(index, block, mixed.shape[1]))

    def hide(self, block: TalkingBlock, logits: torch.Tensor, lowest: torch.Tensor) -> None:
        """Replace, in place, what the mask hides of logits (sequences, queries, heads, keys); add an additive mask."""
        if self.triangle is not None:
            logits = logits[..., block.queries.start :]
            visible = self.triangle[: logits.shape[1], None, : logits.shape[3]]
        elif self.mask is not None:
            visible = self.mask_part(block.queries, block.keys)
        else:
            return
        if visible.dtype == torch.bool:
            torch.where(visible, logits, lowest, out=logits)
        else:
            logits += visible

    def mixed_weights(self, block: TalkingBlock, weights: torch.Tensor) -> torch.Tensor:
        """Weights after the second map, in memory 1, as (heads x sequences, queries, keys) of the values' dtype."""
        out = self.take(1, block, self.weights_maps.by_query.shape[2], by_head=self.count > 1)
        return block.by_head(self.weights_maps.apply(block, weights, out)).to(self.value.dtype)

    def attend(self) -> torch.Tensor:
        """Outputs (heads, sequences, queries, features)."""
        output = self.value.new_empty(len(self.value), self.query.shape[1], self.value.shape[2])
        for block in self.blocks():
            weights = self.weights(block, self.logits(block), 0)
            torch.bmm(self.mixed_weights(block, weights), self.value[:, block.keys], out=output[:, block.queries])
        return output.unflatten(0, (-1, self.count))


def talking_mask_span(mask: torch.Tensor) -> tuple[slice, bool]:
    """The keys that some row of a mask (..., keys) shows, and whether a row shows none: then all keys count."""
    visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    if not visible.any(-1).all():
        return slice(0, mask.shape[-1]), True
    columns = visible.flatten(0, -2).any(0).nonzero()
    return slice(int(columns[0]), int(columns[-1]) + 1), False


class TalkingGradients:
    """Sums of the gradients of some sequences, as their `TalkingPart` has them."""

    def __init__(self, part: TalkingPart, logits_maps: TalkingMaps, weights_maps: TalkingMaps) -> None:
        self.part, self.logits_maps, self.weights_maps = part, logits_maps, weights_maps
        self.query = torch.empty_like(part.query)
        self.key, self.value = (torch.zeros_like(x, dtype=part.memory.dtype) for x in (part.key, part.value))

    def add(self, block: TalkingBlock, output: torch.Tensor) -> None:
        """Add those of a block, from those of the outputs (heads x sequences, queries, features)."""
        part, keys = self.part, block.keys
        logits = part.logits(block)  # memory 0
        weights = part.weights(block, logits, 2)
        talking_add_products(self.value[:, keys], part.mixed_weights(block, weights), output)  # memory 1, until here

        grad = part.products(1, block, output, part.value[:, keys])  # of the mixed weights
        self.weights_maps.add(block, grad, weights)
        grad = part.weights_maps.turned().apply(block, grad, part.take(3, block, weights.shape[1]))
        product = torch.mul(grad, weights, out=part.take(1, block, weights.shape[1]))
        grad.sub_(product.sum(-1, keepdim=True)).mul_(weights)  # of the mixed logits
        if block.blind and part.mask is not None and part.mask.dtype == torch.bool:  # elsewhere hidden ones have none
            part.hide(block, block.rows(grad), part.zero)
        self.logits_maps.add(block, grad, logits)
        out = part.take(1, block, logits.shape[1], by_head=part.count > 1)
        grad = block.by_head(part.logits_maps.turned().apply(block, grad, out)).to(part.key.dtype)
        torch.bmm(grad, part.key[:, keys], out=self.query[:, block.queries])
        talking_add_products(self.key[:, keys], grad, part.query[:, block.queries])


def talking_add_products(total: torch.Tensor, maps: torch.Tensor, rows: torch.Tensor) -> None:
    """Add the sums of rows (heads, queries, features) that maps (heads, queries, keys) weigh, for each key."""
    if rows.dtype == total.dtype:
        total.baddbmm_(maps.mT, rows)
    else:
        total += torch.bmm(maps.mT, rows)


def talking_forward(call: TalkingCall) -> torch.Tensor:
    """Outputs (B, T, heads, features)."""
    batch, _, queries, _ = call.query.shape
    output = call.value.new_empty(batch, queries, call.weights_map.shape[2], call.value.shape[3])
    for items, part in call.parts(TALKING_HELD_FORWARD):
        output[items] = part.attend().permute(1, 2, 0, 3)
    return output


def talking_backward(call: TalkingCall, grad_output: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of the seven tensors before the mask; an empty one of what is None."""
    heads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (call.query, call.key, call.value)]
    wide = widened(call.query.dtype)
    given = (call.logits_map, call.logits_key_map), (call.weights_map, call.weights_key_map)
    maps = [TalkingMaps(*(None if x is None else torch.zeros_like(x, dtype=wide) for x in pair)) for pair in given]
    for items, part in call.parts(TALKING_HELD_BACKWARD):
        found = TalkingGradients(part, *(each.of(items) for each in maps))
        output = talking_side_by_side(grad_output[items].transpose(1, 2), grad_output.shape[2])
        for block in part.blocks():
            found.add(block, output[:, block.queries])
        for total, side in zip(heads, (found.query, found.key, found.value), strict=True):
            groups = side.view(total.shape[1], -1, part.count, *total.shape[2:])
            total[items] = groups.sum(1).transpose(0, 1)
    maps[0] = maps[0].scaled(call.scaling)  # the scaling is in the first maps
    flat = [x for each in maps for x in (each.by_query, each.by_key)]
    return [*heads, *(call.query.new_empty(0, dtype=wide) if x is None else x for x in flat)]


@torch.library.custom_op(f"{TALKING_NAMESPACE}::blocks", mutates_args=())
def talking_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    logits_map: torch.Tensor,
    logits_key_map: torch.Tensor | None,
    weights_map: torch.Tensor,
    weights_key_map: torch.Tensor | None,
    mask: torch.Tensor | None,
    scaling: float,
    causal: bool,
) -> torch.Tensor:
    """Outputs (B, T, heads, features) of queries (B, H, T, d), keys (B, groups, S, d), values (B, groups, S, features).

    Maps are (B or 1, T or 1, to, from), those of keys (B, S, to, from), all in the widened dtype. The mask is
    (B or 1, softmax heads or 1, T or 1, S), True where a key is visible, or additive. Without a mask, `causal` shows
    query `t` the keys up to `t`. A query that sees no key weighs every key alike, as in eager attention.
    """
    call = TalkingCall(
        query, key, value, logits_map, logits_key_map, weights_map, weights_key_map, mask, scaling, causal
    )
    with maybe_autocast(query.device.type, enabled=False):
        return talking_forward(call)


@torch.library.custom_op(f"{TALKING_NAMESPACE}::gradients", mutates_args=())
def talking_gradients(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    logits_map: torch.Tensor,
    logits_key_map: torch.Tensor | None,
    weights_map: torch.Tensor,
    weights_key_map: torch.Tensor | None,
    mask: torch.Tensor | None,
    scaling: float,
    causal: bool,
) -> list[torch.Tensor]:
    """What `talking_backward` returns, as an operator."""
    call = TalkingCall(
        query, key, value, logits_map, logits_key_map, weights_map, weights_key_map, mask, scaling, causal
    )
    with maybe_autocast(query.device.type, enabled=False):
        return talking_backward(call, grad_output)


def talking_fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The shape of the outputs."""
    return value.new_empty(query.shape[0], query.shape[2], rest[2].shape[2], value.shape[3])


def talking_gradients_fake(grad_output: torch.Tensor, *call: Any) -> list[torch.Tensor]:
    """The shapes of the gradients."""
    heads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in call[:3]]
    wide = widened(call[0].dtype)
    return [*heads, *(call[0].new_empty(0 if x is None else x.shape, dtype=wide) for x in call[3:7])]


def talking_keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Save the inputs for the backward pass."""
    ctx.save_for_backward(*inputs[:8])
    ctx.rest = inputs[8:]


def talking_autograd(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Gradients of the inputs that need one."""
    found = talking_gradients(grad_output, *ctx.saved_tensors, *ctx.rest)
    used = (grad if needed else None for grad, needed in zip(found, ctx.needs_input_grad, strict=False))
    return (*used, None, None, None)


talking_blocks.register_fake(talking_fake)
talking_gradients.register_fake(talking_gradients_fake)
talking_blocks.register_autograd(talking_autograd, setup_context=talking_keep)
