"""Differential attention: the second head of a pair is subtracted from the first.

Query heads pair up as (0, 1), (2, 3), ..., key/value heads likewise; query pair `p` reads key/value pair `p // group
size`. A pair's output is `(softmax_1 - lambda softmax_2) concat(v_1, v_2)`, an RMSNorm without weight over its `2d`
features, times `1 - lambda_init`. `lambda = exp(q1.k1) - exp(q2.k2) + lambda_init`, four vectors per layer.
"crosshead_differential" computes it by ordinary attention, of first and of second heads with each half of the
values: four calls with half of the heads, so that flash and flex attention work and nothing is copied. There is no
neutral start, and no dropout: the paper defines none for a difference of weights.

Paper: "Explicit Multi-head Attention ...", section 3.1, after "Differential Transformer".
"""

import math
from dataclasses import replace
from typing import Any

import torch
import transformers.initialization as init
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..backends import ENGINES, PREFIX, is_plain_sdpa, register_backend
from ..ops import attention_weights, weigh_values, widened
from ..options import Flag, refuse
from .base import AttentionState, HeadLayout, Mechanism, ParameterModule, Rules, Settings


class DifferentialRules(Rules):
    """The options of differential."""

    options = {"norm": Flag(True)}
    replaces_attention = True

    @classmethod
    def check(cls, settings: Settings, layout: HeadLayout, layer: dict[str, Settings]) -> None:
        """Heads come in pairs."""
        for name, heads in (
            ("num_attention_heads", layout.query_heads),
            ("num_key_value_heads", layout.key_value_heads),
        ):
            if heads % 2:
                raise refuse(name, heads, "mixers.differential pairs heads: use an even number")
        if layout.dropout:
            raise refuse("attention_dropout", layout.dropout, "mixers.differential has none: use 0.0")

    @classmethod
    def reshape(cls, settings: Settings, layout: HeadLayout) -> HeadLayout:
        """Half as many outputs, twice as wide."""
        return replace(layout, output_heads=layout.query_heads // 2)


class Differential(Mechanism, ParameterModule):
    """The layer's lambda; calling it computes the number."""

    rules = DifferentialRules
    lambda_q1: nn.Parameter
    lambda_k1: nn.Parameter
    lambda_q2: nn.Parameter
    lambda_k2: nn.Parameter

    def __init__(self, layout: HeadLayout, settings: Settings) -> None:
        super().__init__(layout, settings)
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layout.layer_index)  # layers count from 0
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            self.register_parameter(name, nn.Parameter(torch.empty(layout.head_dim)))

    def initialise(self, std: float) -> None:
        """Start near `lambda_init`."""
        for parameter in self.parameters(recurse=False):
            init.normal_(parameter, mean=0.0, std=0.1)

    def forward(self) -> Tensor:
        """The layer's lambda."""
        wide = widened(self.lambda_q1.dtype)
        first = torch.sum(self.lambda_q1.to(wide) * self.lambda_k1.to(wide))
        second = torch.sum(self.lambda_q2.to(wide) * self.lambda_k2.to(wide))
        return torch.exp(first) - torch.exp(second) + self.lambda_init

    @classmethod
    def check_implementation(cls, implementation: str | None) -> None:
        """Implementations that may be called several times in a layer."""
        if implementation in ENGINES:
            reason = "'differential' calls attention 4 times: use 'sdpa', 'eager', flash attention or 'flex_attention'"
            raise refuse("attn_implementation", implementation, reason)

    def attention_function(self, state: AttentionState, implementation: str | None, masked: bool) -> str | None:
        """Differences of the model's own attention."""
        self.check_implementation(implementation)
        implementation = "sdpa" if str(implementation).startswith(PREFIX) else implementation
        state.attention_kwargs = {"subtracted": self(), "implementation": implementation}
        return "crosshead_differential"

    def head_outputs(self, output: Tensor, state: AttentionState) -> Tensor:
        """Norm each pair's output."""
        if not self.settings["norm"]:
            return output
        return (1 - self.lambda_init) * functional.rms_norm(output, output.shape[-1:], eps=self.layout.norm_eps)


def pairs_of(x: Tensor) -> tuple[Tensor, ...]:
    """(B, heads, T, d): views of the pairs' first heads and of their second heads."""
    return x.view(x.shape[0], -1, 2, *x.shape[2:]).unbind(2)


def differential_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    subtracted: Tensor | None = None,
    implementation: str | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Outputs (B, T, pairs, 2d): the first heads' attention minus `subtracted` times the second heads'."""
    if subtracted is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    scale = subtracted.to(query.dtype)
    masks: Any = (attention_mask, attention_mask)
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 4 and attention_mask.shape[1] > 1:
        masks = pairs_of(attention_mask)
    elif query.shape[2] == 1 and is_plain_sdpa(implementation):
        return attend_one_query(query, key, value, attention_mask, scaling, scale), None
    pairs, halves = zip(pairs_of(query), pairs_of(key), masks, strict=True), pairs_of(value)
    weights = None
    if implementation in (None, "eager"):
        stacked = torch.stack([attention_weights(q, k, mask, scaling) for q, k, mask in pairs], dim=2).flatten(1, 2)
        weights = stacked  # the outputs are made from it, so it has a gradient
        outputs = [[weigh_values(part, half) for half in halves] for part in pairs_of(stacked)]
    else:
        attend, options = ALL_ATTENTION_FUNCTIONS[implementation], {"scaling": scaling, **kwargs}
        outputs = [[attend(module, q, k, half, mask, **options)[0] for half in halves] for q, k, mask in pairs]
    return torch.cat([first - scale * second for first, second in zip(*outputs, strict=True)], dim=-1), weights


def attend_one_query(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, scale: Tensor
) -> Tensor:
    """The same for one query (B, heads, 1, d): each pair of keys is a sequence, with one half of the values at a time.

    The query heads that share a pair of keys are the rows of its two heads.
    """
    batch, pairs = len(query), key.shape[1] // 2
    rows = query.reshape(batch * pairs, -1, 2, query.shape[3]).transpose(1, 2)
    keys, values = (x.reshape(batch * pairs, 2, *x.shape[2:]) for x in (key, value))
    if mask is not None:
        mask = mask.expand(batch, pairs, -1, -1).reshape(batch * pairs, 1, *mask.shape[2:])
    halves = [values[:, half, None].expand_as(values) for half in (0, 1)]
    attend = functional.scaled_dot_product_attention
    output = torch.cat([attend(rows, keys, half, attn_mask=mask, scale=scaling) for half in halves], dim=-1)
    return (output[:, 0] - scale * output[:, 1]).view(batch, 1, -1, output.shape[3])


register_backend("crosshead_differential", differential_attention_forward)
