"""Headwise gates: each head's output is multiplied by a sigmoid of the layer's input.

`o_i <- g_i o_i`, `g = 2 sigmoid(x G)`, one number per token and head. `G` starts as zero, so that every gate is 1:
the model starts with the outputs of the stock model.

Paper: "Gated Attention for Large Language Models", headwise variant. The factor 2 is not in the paper.
"""

import torch
from torch import Tensor

from ..ops import local_heads
from .base import AttentionState, HeadLayout, LinearMap, Mechanism, Rules, Settings, package_only


class GatingRules(Rules):
    """Gating has no options but `layers`."""

    options = {}

    @classmethod
    def splits_heads(cls, settings: Settings) -> bool:
        """True: each process uses the gates of its own heads."""
        return True

    @classmethod
    @package_only
    def starts_neutral(cls, settings: Settings, layout: HeadLayout) -> bool:
        """True: every gate starts as 1."""
        return True


class Gating(Mechanism):
    """Computes one gate per token and head, and multiplies head outputs by it."""

    rules = GatingRules

    def __init__(self, layout: HeadLayout, settings: Settings) -> None:
        super().__init__(layout, settings)
        self.gate = LinearMap(layout.hidden_size, layout.output_heads, "zero")

    def head_outputs(self, output: Tensor, state: AttentionState) -> Tensor:
        """Return each head's output multiplied by its gate."""
        gates = 2 * torch.sigmoid(self.gate(state.hidden_states))
        return output * local_heads(gates, output.shape[2]).unsqueeze(-1).to(output.dtype)
