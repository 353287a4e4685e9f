"""The MLP knock in training: one pass over blocks of rows, which keeps nothing but its input for the backward pass.

Written out step by step, the MLP keeps five tensors of the size of its input, and on a CPU moving these takes longer
than the products. Here the first two maps are one product, a block's intermediates stay in the cache, and the backward
pass computes them again.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

BLOCK = 4096
"""Rows of a block on a CPU: with 64 to 128 features its intermediates fit in a core's cache."""


class FusedMlpKnock(torch.autograd.Function):
    """`2 (x U * sigmoid(x G)) D` from x (..., d), `U` and `G` side by side (d, 2d), and `D` (d, d)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, up_gate: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        """The mapped rows."""
        ctx.save_for_backward(x, up_gate, down)
        mapped = torch.empty_like(x, memory_format=torch.contiguous_format)
        for rows, out in zip(_blocks(x), _blocks(mapped), strict=True):
            up, gate = _up_and_gate(rows, up_gate)
            torch.mm(up.mul_(gate), 2 * down, out=out)
        return mapped

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of the rows and of the maps, each block's intermediates made once more."""
        x, up_gate, down = ctx.saved_tensors
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        grad_up_gate, grad_down = torch.zeros_like(up_gate), torch.zeros_like(down)
        for rows, grad_out, grad_rows in zip(_blocks(x), _blocks(grad), _blocks(grad_x), strict=True):
            up, gate = _up_and_gate(rows, up_gate)
            grad_inner = torch.mm(grad_out, 2 * down.t())
            grad_down.addmm_((up * gate).t(), grad_out, alpha=2)
            # Of the sigmoid: gate * (1 - gate).
            grad_both = torch.cat([grad_inner * gate, grad_inner.mul_(up).mul_(gate).mul_(1 - gate)], dim=1)
            grad_up_gate.addmm_(rows.t(), grad_both)
            torch.mm(grad_both, up_gate.t(), out=grad_rows)
        return grad_x, grad_up_gate, grad_down


def _blocks(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows (n, d) by the block; all of them at once off the CPU."""
    rows = x.reshape(-1, x.shape[-1])
    return rows.split(BLOCK if x.device.type == "cpu" else max(len(rows), 1))


def _up_and_gate(rows: torch.Tensor, up_gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x U` and `sigmoid(x G)`."""
    up, gate = torch.mm(rows, up_gate).chunk(2, dim=1)
    return up, torch.sigmoid(gate)
