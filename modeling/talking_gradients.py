"""The backward pass of Talking-Heads in blocks of queries; see `talking_blocks` for the forward one."""

import torch

from .numerics import widened
from .query_blocks import Block
from .talking_blocks import Scratch, TalkingCall, block_logits, block_weights, met, mix, weigh

HELD = 4
"""Tensors of a block's size at a time."""
INPUTS = ("query", "key", "value", "logits_map", "logits_key_map", "weights_map", "weights_key_map")
"""What has a gradient."""


def gradients_in_blocks(call: TalkingCall, grad_output: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of `INPUTS` from that of the outputs (B, T, heads, features); an empty one of what is None."""
    call = call.settled(HELD)
    blocks = call.blocks(HELD)
    scratch = Scratch(call, blocks, HELD)
    grad_output = grad_output.transpose(1, 2).contiguous()
    totals = {name: _zeros(getattr(call, name), call.query) for name in INPUTS}
    for block in blocks:
        _add_block(call, block, grad_output[block.item, :, block.queries], totals, scratch)
    for name in ("logits_map", "logits_key_map"):  # of the maps before the scaling went in
        totals[name] *= call.scaling
    heads = {side: totals[side].to(call.query.dtype) for side in ("query", "key", "value")}
    return list((totals | heads).values())


def _add_block(
    call: TalkingCall, block: Block, grad_output: torch.Tensor, totals: dict[str, torch.Tensor], scratch: Scratch
) -> None:
    item, keys = block.item, block.keys
    query, key, value = call.query[item, :, block.queries], call.key[item, :, keys], call.value[item, :, keys]
    logits = block_logits(call, block, scratch)  # scratch 0
    weights = block_weights(call, block, logits, scratch)  # 1
    mixed = mix(call.weights_map, call.weights_key_map, block, weights, scratch, 2)
    _add_weighed(totals["value"][item, :, keys], mixed, grad_output)

    grad = met(grad_output, value, scratch, 2)  # of the mixed weights
    _add_maps(totals, "weights", block, grad, weights)
    grad = mix_back(call.weights_map, call.weights_key_map, block, grad, scratch, 3)
    into = scratch.take(2, *grad.shape)
    grad = torch._softmax_backward_data(grad, weights, -1, weights.dtype, grad_input=into)  # of the mixed logits
    block.stop_gradient(grad, call.mask)
    _add_maps(totals, "logits", block, grad, logits)
    grad = mix_back(call.logits_map, call.logits_key_map, block, grad, scratch, 3)
    weigh(grad, key, totals["query"][item, :, block.queries])
    _add_weighed(totals["key"][item, :, keys], grad, query)


def mix_back(
    maps: torch.Tensor, key_maps: torch.Tensor | None, block: Block, grad: torch.Tensor, scratch: Scratch, index: int
) -> torch.Tensor:
    """The gradient (queries, from, keys) of what `mix` was given, from that of its result."""
    turned = None if key_maps is None else key_maps.transpose(2, 3)
    return mix(maps.transpose(2, 3), turned, block, grad, scratch, index)


def _add_weighed(total: torch.Tensor, maps: torch.Tensor, rows: torch.Tensor) -> None:
    """Add to columns (groups, S, d) the sums of rows (H, T, d) that maps (T, H, S) weigh."""
    members = rows.shape[0] // total.shape[0]
    for member in range(members):
        turned = maps[:, member::members].permute(1, 2, 0)  # (groups, S, T)
        if rows.dtype == total.dtype:
            total.baddbmm_(turned, rows[member::members])
        else:
            total += torch.bmm(turned.to(rows.dtype), rows[member::members])


def _add_maps(
    totals: dict[str, torch.Tensor], stage: str, block: Block, grad: torch.Tensor, given: torch.Tensor
) -> None:
    """Add the gradients of a stage's maps: `given` (queries, from, keys) was mapped, `grad` is that of the result."""
    total = block.query_part(totals[f"{stage}_map"])
    total += torch.bmm(grad, given.transpose(1, 2)).sum_to_size(total.shape)
    if totals[f"{stage}_key_map"].numel():
        totals[f"{stage}_key_map"][block.item, block.keys] += torch.einsum("tis,tjs->sij", grad, given)


def _zeros(like: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor:
    wide = widened(query.dtype)
    return query.new_empty(0, dtype=wide) if like is None else torch.zeros_like(like, dtype=wide)
