"""Differential attention: in each pair of heads, the second head's attention is subtracted from the first's.

Query heads form pairs (0, 1), (2, 3), ..., and so do key/value heads; query pair `p` reads key/value pair
`p // group size`. The output of a pair is `(softmax_1 - lambda softmax_2) concat(v_1, v_2)`, then an RMSNorm without
weight over its `2d` features, times `1 - lambda_init`. `lambda = exp(q1.k1) - exp(q2.k2) + lambda_init`, with four
learnt vectors per layer. With `half_values`, value heads have half the size, so that a pair's output has the size of
one head. "crosshead_differential" makes four calls of ordinary attention: first and second heads, each with both
halves of the values. So flash and flex attention work, and nothing is copied. There is no dropout: the paper defines
none for a difference of weights.

Version 2 pairs query heads only. Both heads of a pair read the same key/value head, so that one call of ordinary
attention computes all heads, and `o_i = attention_2i - sigmoid(x_t . w_i + b_i) attention_2i+1`, without a norm;
`o_proj` reads half as many features. The paper has no bias `b`; conversions set it so that lambda starts small.

Papers: "Explicit Multi-head Attention ...", section 3.1, after "Differential Transformer"; "Differential Transformer
V2" (Microsoft, 2026).
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
from ..ops import attention_weights, local_heads, weigh_values, widened
from ..options import Flag, Integer, refuse
from .base import AttentionState, HeadLayout, LinearMap, Mechanism, ParameterModule, Rules, Settings


class DifferentialRules(Rules):
    """The options of differential."""

    options = {"version": Integer(1), "norm": Flag(None), "half_values": Flag(False)}
    replaces_attention = True

    @classmethod
    def complete(cls, options: Settings) -> Settings:
        """Set the default of `norm`: True in version 1, False in version 2, which has no norm."""
        return {"norm": options["version"] == 1} | options

    @classmethod
    def check(cls, settings: Settings, layout: HeadLayout, layer: dict[str, Settings]) -> None:
        """Check the version, its options, and that the heads can be paired."""
        if settings["version"] > 2:
            raise refuse("mixers.differential.version", settings["version"], "use 1 or 2")
        if settings["version"] == 2:
            for option in ("norm", "half_values"):
                if settings[option]:
                    raise refuse(f"mixers.differential.{option}", True, "version 2 has none: use False")
            if layout.query_heads % (2 * layout.key_value_heads):
                reason = f"KV heads need pairs of query heads: use a multiple of {2 * layout.key_value_heads}"
                raise refuse("num_attention_heads", layout.query_heads, reason)
            return
        counts = {"num_attention_heads": layout.query_heads, "num_key_value_heads": layout.key_value_heads}
        for name, heads in counts.items():
            if heads % 2:
                raise refuse(name, heads, "mixers.differential pairs heads: use an even number")
        if layout.dropout:
            raise refuse("attention_dropout", layout.dropout, "mixers.differential has none: use 0.0")

    @classmethod
    def reshape(cls, settings: Settings, layout: HeadLayout) -> HeadLayout:
        """Return a layout with half as many head outputs: twice as wide as values in version 1, as wide in 2."""
        layout = replace(layout, output_heads=layout.query_heads // 2)
        if settings["version"] == 2:
            return layout
        value_dim = layout.value_dim // 2 if settings["half_values"] else layout.value_dim
        return replace(layout, value_dim=value_dim, output_dim=2 * value_dim)

    @classmethod
    def splits_heads(cls, settings: Settings) -> bool:
        """True in version 2, where each process uses the lambdas of its own pairs."""
        return settings["version"] == 2


class Differential(Mechanism, ParameterModule):
    """Computes lambda: one number for the layer or, in version 2, one per token and pair (B, T, pairs)."""

    rules = DifferentialRules
    lambda_q1: nn.Parameter
    lambda_k1: nn.Parameter
    lambda_q2: nn.Parameter
    lambda_k2: nn.Parameter

    def __init__(self, layout: HeadLayout, settings: Settings) -> None:
        super().__init__(layout, settings)
        self.version: int = settings["version"]
        if self.version == 2:
            self.lambda_proj = LinearMap(layout.hidden_size, layout.output_heads)
            self.lambda_bias = nn.Parameter(torch.empty(layout.output_heads))
            return
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layout.layer_index)  # layers are numbered from 0
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            self.register_parameter(name, nn.Parameter(torch.empty(layout.head_dim)))

    def initialise(self, std: float) -> None:
        """Draw the vectors of lambda with std 0.1; in version 2, set the bias to zero."""
        for parameter in self.parameters(recurse=False):
            init.normal_(parameter, mean=0.0, std=0.1 if self.version == 1 else 0.0)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return lambda for hidden states (B, T, hidden)."""
        if self.version == 2:
            return torch.sigmoid(self.lambda_proj(hidden_states) + self.lambda_bias)
        wide = widened(self.lambda_q1.dtype)
        first = torch.sum(self.lambda_q1.to(wide) * self.lambda_k1.to(wide))
        second = torch.sum(self.lambda_q2.to(wide) * self.lambda_k2.to(wide))
        return torch.exp(first) - torch.exp(second) + self.lambda_init

    @classmethod
    def check_implementation(cls, implementation: str | None, settings: Settings) -> None:
        """Refuse flash attention for halved values, and serving engines for version 1, which needs 4 calls."""
        if settings["half_values"] and str(implementation).startswith("flash"):
            reason = "it needs values as large as keys, and mixers.differential.half_values halves them: use 'sdpa'"
            raise refuse("attn_implementation", implementation, reason)
        if implementation in ENGINES and settings["version"] == 1:
            reason = "'differential' calls attention 4 times: use 'sdpa', 'eager', flash attention or 'flex_attention'"
            raise refuse("attn_implementation", implementation, reason)

    def attention_function(self, state: AttentionState, implementation: str | None, masked: bool) -> str | None:
        """Choose "crosshead_differential"; in version 2 the model's own, whose outputs `head_outputs` subtracts."""
        self.check_implementation(implementation, self.settings)
        implementation = "sdpa" if str(implementation).startswith(PREFIX) else implementation
        if self.version == 2:
            return implementation
        state.attention_kwargs = {"subtracted": self(state.hidden_states), "implementation": implementation}
        return "crosshead_differential"

    def head_outputs(self, output: Tensor, state: AttentionState) -> Tensor:
        """Normalise the output of each pair; in version 2, subtract the second head's output from the first's."""
        if self.version == 2:
            first, second = output.chunk(2, dim=-1)
            scale = local_heads(self(state.hidden_states), output.shape[2])
            return first - scale.unsqueeze(-1).to(output.dtype) * second
        if not self.settings["norm"]:
            return output
        return (1 - self.lambda_init) * functional.rms_norm(output, output.shape[-1:], eps=self.layout.norm_eps)


def pairs_of(x: Tensor) -> tuple[Tensor, ...]:
    """Return views (B, pairs, T, d) of the first and of the second heads of all pairs in (B, heads, T, d)."""
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
    """Return outputs (B, T, pairs, 2d): attention of first heads minus `subtracted` times that of second heads."""
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
        weights = stacked  # the tensor that outputs are computed from, for its gradient
        outputs = [[weigh_values(part, half) for half in halves] for part in pairs_of(stacked)]
    else:
        attend, options = ALL_ATTENTION_FUNCTIONS[implementation], {"scaling": scaling, **kwargs}
        outputs = [[attend(module, q, k, half, mask, **options)[0] for half in halves] for q, k, mask in pairs]
    return torch.cat([first - scale * second for first, second in zip(*outputs, strict=True)], dim=-1), weights


def attend_one_query(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, scale: Tensor
) -> Tensor:
    """Differential attention of one query (B, heads, 1, d), with each pair of key heads as one sequence of the batch.

    The query heads that share a key head are its queries, and each half of the values takes one call.
    """
    batch, pairs = query.shape[0], key.shape[1] // 2
    rows = query.reshape(batch * pairs, -1, 2, query.shape[3]).transpose(1, 2)
    keys, values = (x.reshape(batch * pairs, 2, *x.shape[2:]) for x in (key, value))
    if mask is not None:
        mask = mask.expand(batch, pairs, -1, -1).reshape(batch * pairs, 1, *mask.shape[2:])
    halves = [values[:, half, None].expand_as(values) for half in (0, 1)]
    attend = functional.scaled_dot_product_attention
    output = torch.cat([attend(rows, keys, half, attn_mask=mask, scale=scaling) for half in halves], dim=-1)
    return (output[:, 0] - scale * output[:, 1]).view(batch, 1, -1, output.shape[3])


register_backend("crosshead_differential", differential_attention_forward)
