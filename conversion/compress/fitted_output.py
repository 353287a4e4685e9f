"""Fits a layer's output projection to its compressed heads by least squares.

A compressed head does not reproduce the original head's output, but all heads together contain more information on it.
The inputs are those of the converted model, whose earlier layers have changed. The target is the source's attention
output plus the difference between the source's and the converted model's hidden states before the layer, so that the
fit also corrects errors of earlier layers. A ridge penalty on the change keeps the projection near the original one if
there is little text.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..calibration.head_statistics import fast_dtype, fast_products, full_products
from .layer_rewrites import Tensors, substituted

FitData = tuple[torch.Tensor, torch.Tensor]
"""Inputs (T, m) and targets (T, n) of a linear map, for one window."""
RIDGE = 0.2
"""Ridge penalty relative to the mean square of the head features."""
MAX_TOKENS = 32 * 1024
"""Maximum number of tokens for a fit."""


class AttentionCalls:
    """Inputs and target outputs for the fit of one layer's attention, on evenly spaced windows.

    Register it as a forward hook of the source's attention, which is called once per window. `source` and `converted`
    are the hidden states (B, T, hidden) before the layer in the source and in the converted model, and `norm` is the
    norm before attention.
    """

    def __init__(self, norm: nn.Module, source: torch.Tensor, converted: torch.Tensor) -> None:
        self._every, self._count = -(-source.shape[0] * source.shape[1] // MAX_TOKENS), 0
        source, converted = (states[:: self._every].unsqueeze(1) for states in (source, converted))
        self.inputs = [norm(states).to(fast_dtype()) for states in converted]
        self.outputs = [(one - other).to(fast_dtype()) for one, other in zip(source, converted, strict=True)]
        self.sizes = [*source]
        """Mean square of each token's hidden state after attention (1, T); before the hook runs, the hidden states."""
        self.arguments: dict[str, Any] = {}
        """Keyword arguments of attention besides hidden states (positions, mask); the same for all calls."""

    def __call__(self, attention: nn.Module, args: Any, inputs: dict[str, Any], output: Any) -> None:
        """Forward hook: add the source's attention output to the targets, unless the window is skipped."""
        index, rest = divmod(self._count, self._every)
        self._count += 1
        if rest == 0:
            self.outputs[index] += output[0]
            size = (self.sizes[index] + output[0]).square().mean(-1)
            self.sizes[index] = size.clamp_min(torch.finfo(size.dtype).tiny)
            self.arguments = {name: value for name, value in inputs.items() if name != "hidden_states"}


@torch.no_grad()
def output_change(attention: Any, calls: AttentionCalls, compressed: Tensors) -> torch.Tensor:
    """Return the fitted change of `o_proj.weight` (hidden, heads d); `compressed` are equivalent stock tensors."""
    heads: list[torch.Tensor] = []
    recorded = attention.o_proj.register_forward_pre_hook(lambda module, args: heads.append(args[0]))

    def missing_outputs() -> Iterator[FitData]:
        for hidden, expected in zip(calls.inputs, calls.outputs, strict=True):
            with fast_products():
                output = attention(hidden_states=hidden.to(attention.o_proj.weight), **calls.arguments)[0]
            yield heads.pop().float().flatten(0, 1), (expected.float() - output.float()).flatten(0, 1)

    with recorded, substituted(attention, compressed), full_products():
        return ridge_map(missing_outputs(), RIDGE).cpu()


def ridge_map(pairs: Iterator[FitData], ridge: float) -> torch.Tensor:
    """Return the linear map (n, m) from x (T, m) to y (T, n) by ridge regression; `ridge` is relative to mean x^2."""
    gram, product = torch.zeros(()), torch.zeros(())
    for x, y in pairs:
        gram, product = gram + (x.mT @ x).double(), product + (y.mT @ x).double()
    penalty = ridge * gram.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
    return torch.linalg.solve(gram + penalty * torch.eye(len(gram)).to(gram), product, left=False).float().contiguous()
