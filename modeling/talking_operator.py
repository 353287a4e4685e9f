"""Talking-Heads in blocks, or on a GPU by Triton, as one operator: autograd and `torch.compile` see it from outside.

The compiler would unroll the loop over blocks, anew for each length. The operator's name is that of this module,
because each copy of the code that a process loads, with a published model, needs its own.
"""

import re
from typing import Any

import torch
from transformers.utils.generic import maybe_autocast

from .numerics import widened
from .talking_blocks import TalkingCall, attend_in_blocks
from .talking_gradients import INPUTS, gradients_in_blocks
from .where_triton_runs import runs_triton

NAMESPACE = re.sub(r"\W", "_", __name__)
ASKS_THE_DEVICE = (torch.Tag.cudagraph_unsafe,)
"""Blocks depend on what a mask hides, which a CUDA graph cannot wait to hear."""


@torch.library.custom_op(f"{NAMESPACE}::attend", mutates_args=(), tags=ASKS_THE_DEVICE)
def talking_attention(
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
    """Outputs (B, T, heads, features); the arguments are those of a `TalkingCall`."""
    call = TalkingCall(
        query, key, value, logits_map, logits_key_map, weights_map, weights_key_map, mask, scaling, causal
    )
    if runs_triton(query):
        from .talking_triton import attend_in_tiles, fits

        if fits(call):
            with torch.cuda.device_of(query):  # on which kernels start, whichever is the current one
                return attend_in_tiles(call)
    with maybe_autocast(query.device.type, enabled=False):
        return attend_in_blocks(call)


@torch.library.custom_op(f"{NAMESPACE}::gradients", mutates_args=(), tags=ASKS_THE_DEVICE)
def _gradients(
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
    call = TalkingCall(
        query, key, value, logits_map, logits_key_map, weights_map, weights_key_map, mask, scaling, causal
    )
    with maybe_autocast(query.device.type, enabled=False):
        return gradients_in_blocks(call, grad_output)


@talking_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> torch.Tensor:
    batch, _, queries, _ = query.shape
    return value.new_empty(batch, queries, rest[2].shape[2], value.shape[3])


@_gradients.register_fake
def _(grad_output: torch.Tensor, *call: Any) -> list[torch.Tensor]:
    wide = widened(call[0].dtype)
    heads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in call[:3]]
    maps = [call[0].new_empty(0 if x is None else x.shape, dtype=wide) for x in call[3:7]]
    return [*heads, *maps]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    tensors, ctx.rest = inputs[: len(INPUTS) + 1], inputs[len(INPUTS) + 1 :]
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    tensors = ctx.saved_tensors
    found = _gradients(grad_output, *tensors, *ctx.rest)
    used = [grad if needed else None for grad, needed in zip(found, ctx.needs_input_grad, strict=False)]
    return (*used, None, None, None)


talking_attention.register_autograd(_backward, setup_context=_keep)
