"""Multi-head Explicit Attention (MEA): key and value heads are linear combinations of component heads.

`K_i = sum_j C_ij B_j`: `h` key (value) heads from `h'` component heads, with the same scalars for every token and
feature. The cache holds the components. RoPE commutes with the combination, so cached components are rotated
already. A per-head norm on keys does not commute: there the cache holds the rotated `w * B_j` and, per token and
combined head, `1 / rms(sum_j C_ij B_j)` in float32 precision. With fewer components than heads, the combination
starts as grouped-query attention with `h'` heads; with as many, as the identity. `norm` adds an RMSNorm over each
head's output. With `groups`, consecutive heads combine the components of their own group only: `C` is
block-diagonal, and `weight` holds its blocks, like the weight of a grouped convolution.

Few queries, as in decoding, attend to the components of a group as one wide head (`explicit_attention_forward`).

Paper: "Explicit Multi-head Attention for Inter-head Interaction in Large Language Models", sections 4.1 and 4.2.
"""

from dataclasses import replace
from typing import Any

import torch
import transformers.initialization as init
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..backends import ENGINES, is_plain_sdpa, logger, register_backend
from ..ops import HeadRMSNorm, apply_mask, head_map_init, inverse_rms, split_heads, wide_heads, widened
from ..options import Count, Flag, Integer, Subset, refuse
from .base import AttentionState, HeadLayout, Mechanism, ParameterModule, Rules, Settings, package_only

FOLDED_ROWS = 16
"""Maximum rows per combined head (its query heads x tokens) for which attention to components is faster."""
FOLDED_TOKENS = 2  # maximum number of query tokens, or the number of query heads per combined head if larger
FLASH_HEAD_SIZE = 256  # maximum of flash kernels on most GPUs; torch's kernel for larger heads uses one multiprocessor


class ExplicitRules(Rules):
    """The options of explicit."""

    options = {
        "on": Subset(("key", "value"), ("key", "value")),
        "key_heads": Count(),
        "value_heads": Count(),
        "groups": Integer(1),
        "norm": Flag(True),
    }

    @classmethod
    def check(cls, settings: Settings, layout: HeadLayout, layer: dict[str, Settings]) -> None:
        """Check the number of components and groups, and that the norm suits the other mechanisms."""
        for side in ("key", "value"):
            name, heads = f"mixers.explicit.{side}_heads", settings.get(f"{side}_heads")
            if heads and side not in settings["on"]:
                raise refuse(name, heads, f"mixers.explicit.on={settings['on']!r} does not have {side!r}")
            if heads and heads > layout.key_value_heads:
                raise refuse(name, heads, f"use 1 to {layout.key_value_heads}, the key/value heads")
        counts = (layout.key_value_heads, layout.key_components, layout.value_components)
        if any(count % settings["groups"] for count in counts):
            allowed = "use a divisor of the {} key/value heads and of the components of keys ({}) and values ({})"
            raise refuse("mixers.explicit.groups", settings["groups"], allowed.format(*counts))
        if settings["norm"] and "differential" in layer:
            raise refuse("mixers.explicit.norm", True, "'differential' norms pairs of heads itself: use False")
        earlier = list(layer)[: list(layer).index("explicit")]
        if settings["norm"] and (gates := {"mixture", "gating"} & {*earlier}):
            reason = f"it would cancel the gates of mixers.{min(gates)}: put 'explicit' first, or use False"
            raise refuse("mixers.explicit.norm", True, reason)

    @classmethod
    def reshape(cls, settings: Settings, layout: HeadLayout) -> HeadLayout:
        """Return a layout in which projections make components, and `k_norm` leaves the division to this mechanism."""
        return replace(
            layout,
            key_components=settings.get("key_heads") or layout.key_components,
            value_components=settings.get("value_heads") or layout.value_components,
            combines_keys="key" in settings["on"],
        )

    @classmethod
    @package_only
    def starts_neutral(cls, settings: Settings, layout: HeadLayout) -> bool:
        """True with as many components as heads, and without `norm`."""
        counts = {settings.get(f"{side}_heads") for side in settings["on"]}
        return not settings["norm"] and counts <= {None, layout.key_value_heads}


class HeadCombination(ParameterModule):
    """Combines components into heads; the weight is `C` (heads, components per group)."""

    def __init__(self, heads: int, components: int, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(heads, components // groups))

    def initialise(self, std: float) -> None:
        """Start each head as one component; with fewer components, neighbouring heads share one."""
        block = head_map_init(self.weight[: len(self.weight) // self.groups])
        init.copy_(self.weight, block.repeat(self.groups, 1).to(self.weight.dtype))

    def forward(self, components: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """Map (B, components, S, d), or one wide head, to (B, heads, S, d); for None, return `C` in `dtype`."""
        weight = self.weight
        if components is None:
            return weight.clone() if weight.dtype == dtype else weight.to(dtype)
        # Not `unflatten`, which breaks the graph of a compiled model under a default device.
        blocks = weight.reshape(self.groups, -1, weight.shape[1])
        components = regroup_heads(components, self.groups * blocks.shape[2])
        grouped = components.reshape(components.shape[0], self.groups, -1, *components.shape[2:])
        return torch.einsum("gij,bgjsd->bgisd", blocks, grouped).flatten(1, 2)


class Explicit(Mechanism):
    """Combines key and value components into heads, and normalises head outputs."""

    rules = ExplicitRules
    maps_last = True
    key: HeadCombination
    value: HeadCombination

    def __init__(self, layout: HeadLayout, settings: Settings) -> None:
        super().__init__(layout, settings)
        components = {"key": layout.key_components, "value": layout.value_components}
        for side in settings["on"]:
            self.add_module(side, HeadCombination(layout.key_value_heads, components[side], settings["groups"]))
        self.norm = HeadRMSNorm(layout.value_dim, layout.norm_eps) if settings["norm"] else None
        self.wide_cache = len(settings["on"]) == 2
        self.divides_keys = layout.key_norm_eps is not None and layout.combines_keys

    def before_rope(self, state: AttentionState) -> None:
        """If combined keys have a norm, cache `1 / rms` of each head; in half precision as the sum of two numbers."""
        if self.divides_keys:
            scale = inverse_rms(self.key(state.key), self.layout.key_norm_eps or 0.0).squeeze(-1).transpose(1, 2)
            parts = [scale.to(state.key.dtype)]
            if parts[0].dtype != scale.dtype:
                parts.append((scale - parts[0]).to(state.key.dtype))
            state.key_side_data["explicit.inverse_rms"] = torch.cat(parts, dim=-1)

    def attention_function(self, state: AttentionState, implementation: str | None, masked: bool) -> str | None:
        """Choose "crosshead_explicit", which attends to components, if there are few queries."""
        heads, tokens = self.layout.key_value_heads, state.query.shape[2]
        shared = state.query.shape[1] // heads
        if implementation in (None, "eager", *ENGINES) or (self.training and self.layout.dropout):
            return None  # before comparing lengths, which would restrict the lengths of an exported model
        few = tokens <= max(FOLDED_TOKENS, shared) and shared * tokens <= FOLDED_ROWS and (masked or tokens == 1)
        if not few or not (is_plain_sdpa(implementation) or self._fits_kernel(state, str(implementation))):
            return None
        state.attention_kwargs = {
            "key_map": self.key(None, state.query.dtype) if "key" in self.settings["on"] else None,
            "value_map": self.value(None, state.value.dtype) if "value" in self.settings["on"] else None,
            "key_scale": self._key_scale(state),
            "implementation": implementation,
        }
        return "crosshead_explicit"

    def _fits_kernel(self, state: AttentionState, implementation: str) -> bool:
        """Whether an implementation other than "sdpa" can attend to wide heads; warns if it cannot."""
        components, size = self.layout.key_components, self.layout.head_dim
        wide_size = components // self.settings["groups"] * size
        fits = self.wide_cache and not self.divides_keys and state.key.shape == state.value.shape
        if fits and (wide_size <= FLASH_HEAD_SIZE or not implementation.startswith("flash")):
            return True
        logger.warning_once(
            f"attn_implementation={implementation!r} cannot attend to the component heads of 'explicit' here "
            f"({components} of size {size}): it combines the whole cache for every token, which 'sdpa' does not"
        )
        return False

    def _key_scale(self, state: AttentionState) -> Tensor | None:
        """Return `1 / rms` of combined keys (B, heads, S) in the widened dtype; None if there is no such norm."""
        if not self.divides_keys:
            return None
        parts = state.key_side_data["explicit.inverse_rms"].split(self.layout.key_value_heads, dim=-1)
        dtype = widened(state.key.dtype)
        return sum((part.to(dtype) for part in parts[1:]), parts[0].to(dtype)).transpose(1, 2)

    def after_cache(self, state: AttentionState) -> None:
        """Combine components into heads, unless "crosshead_explicit" reads the components."""
        if state.function == "crosshead_explicit":
            return
        for side in self.settings["on"]:
            setattr(state, side, getattr(self, side)(getattr(state, side)))
        if (scale := self._key_scale(state)) is not None:
            state.key = (state.key * scale.unsqueeze(-1)).to(state.key.dtype)

    def head_outputs(self, output: Tensor, state: AttentionState) -> Tensor:
        """Normalise each head's output, if `norm` is on."""
        return output if self.norm is None else self.norm(output)


def explicit_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    key_map: Tensor | None = None,
    value_map: Tensor | None = None,
    key_scale: Tensor | None = None,
    implementation: str | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of few queries (B, H, T, d) to component heads (B, h', S, d), or to one wide head that joins them.

    `q_i . sum_j C_ij B_j = [C_i1 q_i, C_i2 q_i, ...] . [B_1, B_2, ...]`: queries are multiplied by `key_map`
    (h, h' / groups), a group's components form one wide head, and wide outputs are multiplied by `value_map`. A side
    whose map is None is not combined. `key_scale` (B, h, S) multiplies combined keys. No mask: all keys are visible.
    """
    if key_map is None and value_map is None:
        options = {"dropout": dropout, "scaling": scaling, **kwargs}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    wide = key_map is not None and value_map is not None
    if key_map is not None:
        query = fold_map(query, key_map)
        key = regroup_heads(key, key.shape[1] * key.shape[3] // query.shape[3])
    if value_map is not None:
        value = regroup_heads(value, key.shape[1] if wide else value.shape[1] // value_map.shape[1])
    if not is_plain_sdpa(implementation):
        attend = ALL_ATTENTION_FUNCTIONS[str(implementation)]
        output = attend(module, query, key, value, attention_mask, scaling=scaling, **kwargs)[0].transpose(1, 2)
    elif wide and key_scale is None and (query.device.type == "cpu" or query.shape[3] <= FLASH_HEAD_SIZE):
        output = attend_wide_heads(query, key, value, attention_mask, scaling)
    else:
        output = weigh_components(query, key, value, attention_mask, scaling, key_scale)
    output = output if value_map is None else unfold_outputs(output, value_map, query.shape[2])
    return output.transpose(1, 2), None


def regroup_heads(x: Tensor, heads: int) -> Tensor:
    """Join neighbouring heads or split wide ones: (B, n, S, d) -> (B, heads, S, n * d / heads)."""
    return x if x.shape[1] == heads else split_heads(wide_heads(x), x.shape[1] * x.shape[3] // heads)


def fold_map(query: Tensor, scalars: Tensor) -> Tensor:
    """Return wide queries (B, H, T, c d): each query (B, H, T, d) times the c scalars (h, c) of its key head."""
    (batch, rows, tokens, size), (heads, components) = query.shape, scalars.shape
    by_head = query.reshape(batch, heads, -1, 1, size)  # (B, h, group x T, 1, d)
    return (by_head * scalars.view(heads, 1, components, 1)).view(batch, rows, tokens, components * size)


def unfold_outputs(output: Tensor, scalars: Tensor, tokens: int) -> Tensor:
    """Return (B, H, T, d): c components of outputs (B, n, H T / n, c d) summed with their head's scalars (h, c)."""
    (batch, _, _, size), (heads, components) = output.shape, scalars.shape
    by_head = output.reshape(batch, heads, -1, components, size // components)
    return (by_head * scalars.view(heads, 1, components, 1)).sum(3).view(batch, -1, tokens, size // components)


def attend_wide_heads(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Return attention outputs (B, g, H T / g, m) of queries (B, H, T, n) over g wide heads, each read once."""
    (batch, heads, tokens, size), groups = query.shape, key.shape[1]
    if mask is not None and (tokens > 1 or mask.shape[1] > 1):
        mask = mask.expand(-1, heads, -1, -1).reshape(len(mask), groups, -1, mask.shape[3])
    rows = query.reshape(batch, groups, -1, size)
    return functional.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)


def weigh_components(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, key_scale: Tensor | None
) -> Tensor:
    """Return outputs (B, H, T, m) of queries (B, H, T, n), with widened logits; keys and values have g or h heads."""
    batch, heads, tokens, _ = query.shape
    rows = query.reshape(batch, key.shape[1], -1, query.shape[3])
    logits = wide_product(rows, key.transpose(2, 3)).view(batch, heads, tokens, -1) * scaling
    if key_scale is not None:
        logits = logits * key_scale.repeat_interleave(heads // key_scale.shape[1], dim=1).unsqueeze(2)
    weights = functional.softmax(apply_mask(logits, mask), dim=-1).view(batch, value.shape[1], -1, key.shape[2])
    return wide_product(weights, value).view(batch, heads, tokens, -1).to(value.dtype)


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Return batched products (B, n, ., .) in the widened dtype. Without gradients, a GPU multiplies half-precision
    factors and accumulates in float32; otherwise, both factors, such as the cache, are copied to the widened dtype."""
    out_dtype, shape = widened(right.dtype), (*left.shape[:3], right.shape[3])
    if right.device.type == "cuda" and right.dtype != out_dtype and not torch.is_grad_enabled():
        factors = left.to(right.dtype).flatten(0, 1), right.flatten(0, 1)
        return torch.bmm(*factors, out_dtype=out_dtype).view(shape)
    return torch.matmul(left.to(out_dtype), right.to(out_dtype))


register_backend("crosshead_explicit", explicit_attention_forward)
