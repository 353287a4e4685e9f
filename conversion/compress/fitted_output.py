"""Fits a layer's output projection to its compressed heads by least squares.

A compressed head does not give the original head's output, but all heads together contain more information on it. The
target is the attention's original output. A ridge penalty on the change keeps the projection near the original one if
there is little text.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..calibration.head_statistics import fast_dtype, fast_products, full_products
from .layer_rewrites import Tensors, substituted

RIDGE = 0.2
"""Relative to a head feature's mean square."""
MAX_WINDOWS = 32


@dataclass
class AttentionCalls:
    """A forward hook that records inputs and outputs of an attention layer, for evenly spaced calls."""

    calls: int
    """The number of calls that are expected."""

    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)
    """Positions and mask, the same for all calls."""
    _count: int = 0

    def __call__(self, attention: nn.Module, args: Any, inputs: dict[str, Any], output: Any) -> None:
        """Record or skip one call."""
        is_recorded = self._count % -(-self.calls // MAX_WINDOWS) == 0
        self._count += 1
        if is_recorded:
            self.inputs.append(inputs["hidden_states"].to(fast_dtype()))
            self.outputs.append(output[0].to(fast_dtype()))
            self.arguments = {name: value for name, value in inputs.items() if name != "hidden_states"}


@torch.no_grad()
def output_change(attention: Any, calls: AttentionCalls, compressed: Tensors) -> torch.Tensor:
    """The change of `o_proj.weight` (hidden, heads d), given stock tensors equivalent to the compressed ones."""
    heads: list[torch.Tensor] = []
    handle = attention.o_proj.register_forward_pre_hook(lambda module, args: heads.append(args[0]))
    weight = attention.o_proj.weight
    gram, product = (weight.new_zeros(rows, weight.shape[1], dtype=torch.float64) for rows in weight.shape[::-1])
    with substituted(attention, compressed):
        for hidden, expected in zip(calls.inputs, calls.outputs, strict=True):
            with fast_products():
                output = attention(hidden_states=hidden.to(weight), **calls.arguments)[0]
            with full_products():
                error, x = (expected.float() - output.float()).flatten(0, 1), heads.pop().float().flatten(0, 1)
                gram += x.mT @ x
                product += error.mT @ x
    handle.remove()
    ridge = RIDGE * gram.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
    return torch.linalg.solve(gram + ridge * torch.eye(len(gram)), product, left=False).float()
