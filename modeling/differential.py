"""Differential attention: the second head of a pair is subtracted from the first.

Query heads pair up as (0, 1), (2, 3), ..., key/value heads likewise; query pair `p` reads key/value pair
`p // group size`. A pair's output is `(softmax_1 - lambda softmax_2) concat(v_1, v_2)`, an RMSNorm without weight
over its `2d` features, times `1 - lambda_init`. `lambda = exp(q1.k1) - exp(q2.k2) + lambda_init`, four vectors per
layer. It is computed as ordinary attention, of first and of second heads with each half of the values: four runs of
half the heads, so that every backend works and nothing is copied for it.
There is no neutral start, and no dropout: the paper defines none for a difference of weights.

Paper: "Explicit Multi-head Attention ...", section 3.1, after "Differential Transformer".
"""

import math
from dataclasses import replace
from typing import ClassVar, cast

import torch
from torch import nn
from transformers import initialization as init

from .eager import attention_weights, weigh_values
from .mixer import Attended, AttentionCall, CallSizes, HeadLayout, HeadStates, Mixer, MixerLeaf, Settings
from .normed_projection import keeps_less, normed_projection
from .numerics import rms_normalised, widened
from .options import Flag, Option


def lambda_start(layer_index: int) -> float:
    """The constant part of lambda; layers count from 0."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer_index)


def pairs_of(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(B, heads, T, d): the pairs' first heads, and their second heads, where they lie."""
    return x.view(x.shape[0], -1, 2, *x.shape[2:]).unbind(2)


class Differential(Mixer, MixerLeaf):
    """The layer's lambda, and attention by differences."""

    options: ClassVar[dict[str, Option]] = {"norm": Flag(True)}
    owns_attention = True
    lambda_q1: nn.Parameter
    lambda_k1: nn.Parameter
    lambda_q2: nn.Parameter
    lambda_k2: nn.Parameter

    def __init__(self, layout: HeadLayout, settings: Settings) -> None:
        super().__init__(layout, settings)
        self.lambda_init = lambda_start(layout.layer_index)
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            self.register_parameter(name, nn.Parameter(torch.empty(layout.head_dim)))

    def initialise(self, std: float) -> None:
        """Start near `lambda_init`."""
        for parameter in self.parameters(recurse=False):
            init.normal_(parameter, mean=0.0, std=0.1)

    @classmethod
    def check(cls, settings: Settings, layout: HeadLayout, layer: dict[str, Settings]) -> None:
        """Heads come in pairs."""
        for name, heads in (
            ("num_attention_heads", layout.query_heads),
            ("num_key_value_heads", layout.key_value_heads),
        ):
            if heads % 2:
                raise ValueError(
                    f"mixers.differential pairs heads, but {name}={heads} is odd: allowed are even counts"
                )
        if layout.dropout:
            raise ValueError(
                f"mixers.differential has no dropout, but attention_dropout={layout.dropout}: allowed is 0.0"
            )

    @classmethod
    def reshape(cls, layout: HeadLayout) -> HeadLayout:
        """Half as many outputs, twice as wide."""
        return replace(layout, output_heads=layout.query_heads // 2)

    def forward(self) -> torch.Tensor:
        """The layer's lambda."""
        wide = widened(self.lambda_q1.dtype)
        first = torch.sum(self.lambda_q1.to(wide) * self.lambda_k1.to(wide))
        second = torch.sum(self.lambda_q2.to(wide) * self.lambda_k2.to(wide))
        return torch.exp(first) - torch.exp(second) + self.lambda_init

    def multiplications(self, call: CallSizes) -> int:
        """Each head's weights meet the values of both heads of a pair, not of one."""
        return self.layout.query_heads * self.layout.head_dim * call.queries * call.keys

    def learnt(self) -> dict[str, torch.Tensor]:
        """Its lambda."""
        return {"lambda": self().detach().reshape(1, 1)}

    def output_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """The difference within each pair, before the norm."""
        return weights[:, 0::2] - self().to(weights.dtype) * weights[:, 1::2]

    def attend(self, states: HeadStates, call: AttentionCall) -> Attended:
        """Attention of first and of second heads, each once per half of the values; then their difference."""
        pairs, halves = zip(pairs_of(states.query), pairs_of(states.key), strict=True), pairs_of(states.value)
        weights = None
        if call.eager:
            seen = [attention_weights(query, key, call.mask, call.scaling) for query, key in pairs]
            weights = torch.stack(seen, dim=2).flatten(1, 2)  # the output is made from it, so it has a gradient
            outputs = [[weigh_values(part, value) for value in halves] for part in pairs_of(weights)]
        else:
            outputs = [[call.run(query, key, value)[0] for value in halves] for query, key in pairs]
        scale = self().to(states.query.dtype)
        output = torch.cat([first - scale * second for first, second in zip(*outputs, strict=True)], dim=-1)
        return output, weights

    def on_output(self, output: torch.Tensor, states: HeadStates) -> torch.Tensor:
        """Norm each pair's output."""
        if not self.settings["norm"]:
            return output
        return (1 - self.lambda_init) * rms_normalised(output, self.layout.norm_eps)

    def project_out(self, projection: nn.Module, output: torch.Tensor, states: HeadStates) -> torch.Tensor:
        """Norm and project in one step where that keeps less for the backward pass."""
        if self.settings["norm"] and keeps_less(projection):
            scale, eps = 1 - self.lambda_init, self.layout.norm_eps
            return normed_projection(output, scale, eps, cast(nn.Linear, projection))
        return super().project_out(projection, output, states)
