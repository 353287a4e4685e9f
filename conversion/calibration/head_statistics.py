"""Activation statistics of one attention layer for method `aligned`: the effect of key and value errors on its output.

To first order, an error `e` (d) of a key or value head adds `sum (y . e)^2` to the squared error of the layer's
output, where `y` (d) is the sensitivity of the output. Errors are linear in the layer's own keys (values) `x` (n), all
heads concatenated: `e = D x`. The sum is split into parts. Each part is stored as a metric (the sum of `y y^T`), a
Gram matrix (the weighted sum of `x x^T`) and the sum of weights, which approximate it by
`tr(metric D gram D^T) / weight`. Their size does not depend on the text, and windows are added up.

- A key's error changes a score, hence the attention weights, hence the output: `y` is the query, rotated back by the
  key's position, times `A |(v - o) W_O|`, with attention weight `A`, value `v` and head output `o`. Parts: a window's
  first key, which is an attention sink; all other keys, without each query's last few keys; these last keys. The sum
  of `y y^T` over queries is estimated by one sum of all `y` with random signs, which is unbiased and much cheaper.
- Values affect the output through their attention-weighted average, which is `x`; `y` are the rows of `W_O`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import rotate_half

from crosshead.modeling.mechanisms.base import HeadLayout
from crosshead.modeling.ops import inverse_rms

from ..architectures.families import Shapes

QUERIES = 128
"""Maximum number of queries per window that are used; they are evenly spaced."""
NEAR = 8
"""Number of a query's last keys that form the part of near keys."""
PARTS = {"key": 3, "value": 1}
"""Side -> number of parts: first key, far keys and near keys; a single part for values."""
KINDS = ("metric", "gram", "weight")
"""Sums that are stored for each side."""
Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of RoPE: (T, d) each."""


def fast_dtype() -> torch.dtype:
    """Return the dtype with the fastest matrix products on this CPU."""
    in_hardware = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if in_hardware else torch.float32


def fast_products() -> torch.autocast:
    """Return a context in which matrix products use `fast_dtype` (autocast).

    The cache of cast weights is off: within a caller's autocast it would keep old values while Adam changes weights.
    """
    dtype = fast_dtype()
    return torch.autocast("cpu", dtype, enabled=dtype != torch.float32, cache_enabled=False)


def full_products() -> torch.autocast:
    """Return a context that switches off an outer `fast_products`."""
    return torch.autocast("cpu", enabled=False)


@dataclass(frozen=True)
class _Window:
    """Tensors of one window of tokens; KV heads are the first dimension, then query heads per KV head (group)."""

    query: torch.Tensor
    """Selected queries after RoPE: (h, group, Q, d)."""
    key: torch.Tensor
    """Keys before norm and RoPE: (h, T, d)."""
    value: torch.Tensor
    """Values: (h, T, d)."""
    weights: torch.Tensor
    """Attention weights of the selected queries: (h, group, Q, T)."""
    output: torch.Tensor
    """`W_O` by head: (h, group, hidden, d)."""
    positions: torch.Tensor
    """Positions of the selected queries: (Q,)."""


class HeadStatistics:
    """Sums over windows: "key.metric" (h, parts, d, d), "key.gram" (h, parts, n, n), "key.weight" (h, parts).

    The sums for "value" have the same shapes. `n` is `h d`, plus one if the projection has a bias: the last feature is
    then the constant 1.
    """

    def __init__(self, layout: HeadLayout, sums: Mapping[str, torch.Tensor] | None = None) -> None:
        self.layout = layout
        self.sums = dict(sums or {})
        self.windows = 0

    @staticmethod
    def shapes(layout: HeadLayout, biased: bool) -> Shapes:
        """Return the names and shapes of the sums in a calibration file."""
        heads, size = layout.key_value_heads, layout.head_dim
        features = heads * size + biased
        tails = {"metric": (size, size), "gram": (features, features), "weight": ()}
        return {f"{side}.{kind}": (heads, parts, *tails[kind]) for side, parts in PARTS.items() for kind in KINDS}

    @torch.no_grad()
    def observe(self, attention: nn.Module, hidden_states: torch.Tensor, position_embeddings: Rotation) -> None:
        """Add windows without padding, given a stock attention's input (B, T, hidden)."""
        cos, sin = (part.expand(hidden_states.shape[0], -1, -1) for part in position_embeddings)
        for hidden, rotation in zip(hidden_states, zip(cos, sin, strict=True), strict=True):
            window = self._window(attention, hidden, rotation)
            self._add_keys(attention, window, rotation)
            self._add_values(attention, window)
            self.windows += 1

    def _window(self, attention: Any, hidden: torch.Tensor, rotation: Rotation) -> _Window:
        heads, length = self.layout.key_value_heads, hidden.shape[0]
        step = -(-length // QUERIES)
        positions = torch.arange(self.windows % step, length, step, device=hidden.device)
        query, key, value = (
            projection(x).unflatten(-1, (-1, attention.head_dim)).transpose(0, 1)
            for projection, x in (
                (attention.q_proj, hidden[positions]),
                (attention.k_proj, hidden),
                (attention.v_proj, hidden),
            )
        )
        has_norm = self.layout.key_norm_eps is not None
        query, normed_key = (attention.q_norm(query), attention.k_norm(key)) if has_norm else (query, key)
        query = _rotate(query, *(part[positions] for part in rotation)).unflatten(0, (heads, -1))
        scores = query @ _rotate(normed_key, *rotation).unsqueeze(1).mT * attention.scaling
        distance = positions[:, None] - torch.arange(length, device=hidden.device)
        maximum = getattr(attention, "sliding_window", None) or length
        scores.masked_fill_((distance < 0) | (distance >= maximum), -torch.inf)
        output = attention.o_proj.weight.unflatten(1, (heads, -1, attention.head_dim)).permute(1, 2, 0, 3)
        return _Window(query, key, value, scores.softmax(-1), output, positions)

    def _add_keys(self, attention: Any, window: _Window, rotation: Rotation) -> None:
        features = _with_one(window.key.transpose(0, 1).flatten(1), attention.k_proj.bias)
        scaled = features.expand(len(window.key), -1, -1)
        if self.layout.key_norm_eps is not None:
            scaled = scaled * inverse_rms(window.key, self.layout.key_norm_eps)
        cos, sin = rotation
        for index, (tokens, directions, importance) in enumerate(_key_parts(window, seed=self.windows)):
            rotated_back = _rotate(directions, cos[tokens], -sin[tokens])
            y = self._through_norm(attention, rotated_back, window.key[:, tokens]).flatten(1, 2)
            importance = importance[:, tokens].clamp_min(0)
            x = scaled[:, tokens].double()  # in float32, a Gram matrix may become indefinite
            self._add("key", index, y.mT @ y, (x * importance.unsqueeze(-1)).mT @ x, importance.sum(1))

    def _through_norm(self, attention: Any, directions: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return the vector-Jacobian product of the key norm for directions (h, group, any, d), without `1 / rms`."""
        eps = self.layout.key_norm_eps
        if eps is None:
            return directions
        directions, along = directions * attention.k_norm.weight, (key * inverse_rms(key, eps)).unsqueeze(1)
        return directions - along * (directions * along).mean(-1, keepdim=True)

    def _add_values(self, attention: Any, window: _Window) -> None:
        features = _with_one(window.value.transpose(0, 1).flatten(1), attention.v_proj.bias)
        averages = (window.weights @ features).flatten(1, 2).double()
        metric = torch.einsum("hgnd,hgne->hde", window.output, window.output) * averages.shape[1]
        weight = torch.full(metric.shape[:1], averages.shape[1]).to(metric)
        self._add("value", 0, metric, averages.mT @ averages, weight)

    def _add(self, side: str, part: int, *new: torch.Tensor) -> None:
        for kind, tensor in zip(KINDS, new, strict=True):
            shape = (tensor.shape[0], PARTS[side], *tensor.shape[1:])
            total = self.sums.setdefault(f"{side}.{kind}", tensor.new_zeros(shape, dtype=torch.float64))
            total[:, part] += tensor


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE, or its inverse if `sin` is negated."""
    return x * cos + rotate_half(x) * sin


def _with_one(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Append a column of ones to features (T, h d) if the projection has a bias."""
    return x if bias is None else torch.cat([x, x.new_ones(x.shape[0], 1)], dim=1)


def _key_parts(window: _Window, seed: int) -> list[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Return, for each part of the keys: positions, directions `y` (h, group, any, d), importance of keys (h, T)."""
    root = _output_change(window).mul_(window.weights)  # (h, group, Q, T)
    nearest, keys = _nearest(root, window.positions)
    near_importance = torch.zeros_like(root[:, 0, 0]).index_add_(1, keys, nearest.square().sum(1).flatten(1))
    importance = torch.linalg.vector_norm(root, dim=(1, 2)).square()
    first = root[..., :1] * window.query
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, root.shape[1:], generator=generator, dtype=torch.int8).mul_(2).sub_(1)
    root *= signs.to(root.device)
    nearest, _ = _nearest(root, window.positions)
    every = root.mT @ window.query
    near = torch.zeros_like(every).index_add_(
        2, keys, (nearest.unsqueeze(-1) * window.query.unsqueeze(3)).flatten(2, 3)
    )
    first_key, other_keys = slice(0, 1), slice(1, None)
    return [
        (first_key, first, importance),
        (other_keys, (every - near)[:, :, other_keys], importance - near_importance),
        (other_keys, near[:, :, other_keys], near_importance),
    ]


def _nearest(root: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the entries for each query's last keys (h, group, Q, NEAR), 0 before the first key; and key positions."""
    keys = positions[:, None] - torch.arange(NEAR, device=positions.device)
    chosen = root.gather(-1, keys.clamp_min(0).expand(*root.shape[:2], -1, -1))
    return chosen.where(keys >= 0, 0), keys.clamp_min(0).flatten()


def _output_change(window: _Window) -> torch.Tensor:
    """Return `|(v_s - o_t) W_O|` for every query t and key s: (h, group, Q, T)."""
    value = window.value.unsqueeze(1)
    average = window.weights @ value
    metric = window.output.mT @ window.output
    average_norm = ((average @ metric) * average).sum(-1, keepdim=True)
    value_norm = ((value @ metric) * value).sum(-1).unsqueeze(-2)
    return (average @ metric @ value.mT).mul_(-2).add_(average_norm).add_(value_norm).clamp_(min=0).sqrt_()
