"""An output projection that reads a layer's compressed heads as well as a linear map can.

What compressed heads give is not what the heads gave, but all heads together tell more of that than each does alone.
The projection is fitted to what the layer's attention gave before: least squares, with a pull towards the projection
that there was, so that little text does not carry it far away.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..calibration.head_statistics import fast_dtype, fast_products, full_products
from .layer_rewrites import Tensors, substituted

PULL = 0.2
"""In parts of a head feature's mean square."""
MOST = 32
"""Windows that are read at most."""


@dataclass
class AttentionCalls:
    """What an attention layer was given and gave, in calls that are spread over all; a forward hook."""

    calls: int
    """How many there will be."""

    given: list[torch.Tensor] = field(default_factory=list)
    gave: list[torch.Tensor] = field(default_factory=list)
    rest: dict[str, Any] = field(default_factory=dict)
    """Positions and mask, the same for all."""
    _seen: int = 0

    def __call__(self, attention: nn.Module, args: Any, inputs: dict[str, Any], output: Any) -> None:
        """Note one, or pass over it."""
        is_read = self._seen % -(-self.calls // MOST) == 0
        self._seen += 1
        if not is_read:
            return
        self.given.append(inputs["hidden_states"].to(fast_dtype()))
        self.gave.append(output[0].to(fast_dtype()))
        self.rest = {name: value for name, value in inputs.items() if name != "hidden_states"}


@torch.no_grad()
def output_change(attention: Any, calls: AttentionCalls, compressed: Tensors) -> torch.Tensor:
    """What is to be added to `o_proj.weight` of stock tensors that act as if compressed: (hidden, heads d)."""
    heads: list[torch.Tensor] = []
    handle = attention.o_proj.register_forward_pre_hook(lambda module, given: heads.append(given[0]))
    weight = attention.o_proj.weight
    gram, product = (weight.new_zeros(rows, weight.shape[1], dtype=torch.float64) for rows in weight.shape[::-1])
    with substituted(attention, compressed):
        for given, gave in zip(calls.given, calls.gave, strict=True):
            with fast_products():
                gives = attention(hidden_states=given.to(weight), **calls.rest)[0]
            with full_products():
                missing, read = (gave.float() - gives.float()).flatten(0, 1), heads.pop().float().flatten(0, 1)
                gram += read.mT @ read
                product += missing.mT @ read
    handle.remove()
    pull = PULL * gram.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
    return torch.linalg.solve(gram + pull * torch.eye(len(gram)), product, left=False).float()
