"""TransNeXt attention: pixels attend to a window and to pooled features; in the last stage, to all pixels.

Queries and keys are normalised to length one. Query plus query embedding is scaled by a learned temperature and by
the log of the number of keys. An MLP computes the position bias from log-scaled distances of query and key.
In aggregated attention, one softmax covers the window around a pixel and the features pooled from the whole feature
map; the window's weights also get a learned term that depends on the query alone. The mechanisms see one sequence of
keys and values: the pixels, then the pooled features.

Paper: "TransNeXt: Robust Foveal Visual Perception for Vision Transformers", sections 3.1 to 3.3.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers.initialization as init
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..attention import CrossheadAttention
from ..backends import register_backend
from ..encoder import submodule_property
from ..mechanisms.base import AttentionState, ParameterModule
from ..ops import apply_mask, weigh_values, widened

BIAS_FEATURES = 512
INITIAL_TEMPERATURE = 1 / 0.24


@dataclass(frozen=True)
class FeatureMap:
    """Size of a stage's feature map, and position tensors that its layers share."""

    height: int
    width: int
    pooled: tuple[int, int] | None
    """(height, width) of the pooled feature map; None for global attention."""
    length_scale: Tensor | float
    """Log of the number of keys of a query; per pixel (N, 1) with windows, which the image border cuts off."""
    distances: Tensor
    """All distinct (vertical, horizontal) distances of query and key, log-scaled: (rows, columns, 2)."""
    row_index: Tensor
    """Row of `distances` for each pair of pixel row and key row (height, key rows); `column_index` likewise."""
    column_index: Tensor
    outside: Any
    """(N, window size ** 2): True where a window position is outside the image; None for global attention."""


def axis_distances(length: int, cells: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return twice the distances of positions to centres of pooled cells: the distinct values, and each pair's index.

    In adaptive pooling, cell `i` covers positions `floor(i * length / cells)` to `ceil((i + 1) * length / cells) - 1`.
    """

    def twice_centre(cell: Any) -> Any:
        return cell * length // cells - (-(cell + 1) * length // cells) - 1

    step = 2 if len({twice_centre(cell) % 2 for cell in range(cells)}) == 1 else 1
    lowest, highest = -twice_centre(cells - 1), 2 * (length - 1) - twice_centre(0)
    position, cell = torch.arange(length, device=device), torch.arange(cells, device=device)
    index = (2 * position.unsqueeze(-1) - twice_centre(cell) - lowest) // step
    return torch.arange(lowest, highest + 1, step, device=device), index


def feature_map(size: tuple[int, int], reduction: int, window: int, pretrained: int, like: Tensor) -> FeatureMap:
    """Return the `FeatureMap` of a size; distances scale to at most 8 for the size in pretraining, `pretrained`."""
    height, width = size
    pooled = None if reduction == 1 else (max(height // reduction, 1), max(width // reduction, 1))
    cells = pooled or size
    wide, device = widened(like.dtype), like.device
    (vertical, rows), (horizontal, columns) = (axis_distances(*axis, device) for axis in zip(size, cells, strict=True))
    grid = torch.meshgrid(vertical.to(wide), horizontal.to(wide), indexing="ij")
    distances = torch.stack(grid, dim=-1) * (8 / 2 / max(pretrained - 1, 1))
    logarithmic = torch.sign(distances) * torch.log2(distances.abs() + 1) / math.log2(8)
    scale: Tensor | float = math.log(height * width)
    outside = None
    if pooled is not None:
        inside = functional.unfold(torch.ones(1, 1, height, width, device=device), window, padding=window // 2)
        outside = inside[0].T == 0
        keys = (~outside).sum(-1, keepdim=True) + pooled[0] * pooled[1]
        scale = torch.log(keys.to(wide)).to(like.dtype)
    return FeatureMap(height, width, pooled, scale, logarithmic.to(like.dtype), rows, columns, outside)


def unit_length(x: Tensor) -> Tensor:
    """Return vectors normalised to length one."""
    return functional.normalize(x.to(widened(x.dtype)), dim=-1).to(x.dtype)


class CrossheadTransNextProjections(ParameterModule):
    """Base class with the parameters of an attention layer that mechanisms do not change."""

    is_causal = False
    scaling = 1.0

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.stage = config.stage_of_layer(layer_idx)
        self.size, self.heads = config.hidden_sizes[self.stage], config.num_attention_heads[self.stage]
        self.temperature = nn.Parameter(torch.empty(self.heads, 1, 1))
        self.query_embedding = nn.Parameter(torch.empty(self.heads, 1, self.size // self.heads))
        self.cpb_fc1 = nn.Linear(2, BIAS_FEATURES)
        self.cpb_fc2 = nn.Linear(BIAS_FEATURES, self.heads)
        self.o_proj = nn.Linear(self.size, self.size)

    def linear(self) -> nn.Linear:
        """Return a new projection of queries, keys or values."""
        return nn.Linear(self.size, self.size, bias=self.config.qkv_bias)

    def initialise(self, std: float) -> None:
        """Initialise the query embedding, and the temperature so that its softplus is `INITIAL_TEMPERATURE`."""
        init.constant_(self.temperature, math.log(math.exp(INITIAL_TEMPERATURE) - 1))
        init.trunc_normal_(self.query_embedding, std=std)

    def unit_distance_bias(self, pixels: FeatureMap) -> Tensor:
        """Return the position bias of pixels and keys (1, H, N, keys); keys are all pixels or the pooled features."""
        table = self.cpb_fc2(functional.relu(self.cpb_fc1(pixels.distances)))
        pairs = table[pixels.row_index[:, None, :, None], pixels.column_index[None, :, None, :]]
        return pairs.flatten(2, 3).flatten(0, 1).permute(2, 0, 1).unsqueeze(0)

    def scaled(self, query: Tensor, length_scale: Tensor | float) -> Tensor:
        """Return normalised queries plus their embedding, times temperature and log of the number of keys."""
        return (query + self.query_embedding) * functional.softplus(self.temperature) * length_scale


class CrossheadGlobalProjections(CrossheadTransNextProjections):
    """Projections of global attention; published checkpoints store queries, keys and values as one matrix."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.qkv = nn.ModuleDict({name: self.linear() for name in ("q_proj", "k_proj", "v_proj")})


class CrossheadTransNextAttention(CrossheadAttention, CrossheadGlobalProjections):
    """Global attention of TransNeXt to all pixels, with mechanisms."""

    q_proj, k_proj, v_proj = map(submodule_property, ("qkv.q_proj", "qkv.k_proj", "qkv.v_proj"))

    def rotate(self, query: Tensor, key: Tensor, length_scale: float) -> tuple[Tensor, Tensor]:
        """Return scaled queries and normalised keys, in the place of RoPE."""
        return self.scaled(unit_length(query), length_scale), unit_length(key)

    def forward(self, hidden_states: Tensor, pixels: FeatureMap) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """Return outputs (B, N, hidden), and the attention weights if the implementation returns them."""
        scale: Any = (pixels.length_scale,)
        return super().forward(hidden_states, scale, position_bias=self.unit_distance_bias(pixels))


class CrossheadAggregatedProjections(CrossheadTransNextProjections):
    """Projections and parameters of aggregated attention: window plus pooled features."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        head_dim, window = self.size // self.heads, config.window_size**2
        self.q_proj = self.linear()
        self.kv = nn.ModuleDict({name: self.linear() for name in ("k_proj", "v_proj")})
        self.sr = nn.Conv2d(self.size, self.size, kernel_size=1)
        self.norm = nn.LayerNorm(self.size)
        self.relative_pos_bias_local = nn.Parameter(torch.empty(self.heads, window))
        self.learnable_tokens = nn.Parameter(torch.empty(self.heads, head_dim, window))
        self.learnable_bias = nn.Parameter(torch.empty(self.heads, 1, window))

    def initialise(self, std: float) -> None:
        """Initialise also the window's position bias, learnable tokens and learnable bias."""
        super().initialise(std)
        init.trunc_normal_(self.relative_pos_bias_local, std=std / 50)
        init.trunc_normal_(self.learnable_tokens, std=std)
        init.zeros_(self.learnable_bias)

    def pooled(self, hidden_states: Tensor, pixels: FeatureMap) -> Tensor:
        """Return the pooled features (B, P, hidden)."""
        maps = hidden_states.transpose(1, 2).unflatten(2, (pixels.height, pixels.width))
        pooled = functional.adaptive_avg_pool2d(functional.gelu(self.sr(maps)), pixels.pooled)
        features: Tensor = self.norm(pooled.flatten(2).transpose(1, 2))
        return features

    def position_bias(self, pixels: FeatureMap) -> Tensor:
        """Return the bias of window and pooled features (1, H, N, keys); -inf for window positions off the image."""
        far = self.unit_distance_bias(pixels)
        near = self.relative_pos_bias_local.unsqueeze(1).masked_fill(pixels.outside, -math.inf)
        return torch.cat([near.unsqueeze(0), far], dim=-1)


class CrossheadAggregatedAttention(CrossheadAttention, CrossheadAggregatedProjections):
    """Aggregated attention of TransNeXt to window and pooled features, with mechanisms."""

    k_proj, v_proj = map(submodule_property, ("kv.k_proj", "kv.v_proj"))

    def rotate(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalised queries and keys; `_attention_function` scales the queries later."""
        return unit_length(query), unit_length(key)

    def forward(self, hidden_states: Tensor, pixels: FeatureMap) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """Return outputs (B, N, hidden), and attention weights (B, H, N, window positions + pooled features)."""
        source = torch.cat([hidden_states, self.pooled(hidden_states, pixels)], dim=1)
        options: dict[str, Any] = {"position_embeddings": (), "key_value_states": source, "pixels": pixels}
        return super().forward(hidden_states, position_bias=self.position_bias(pixels), **options)

    def _attention_function(self, state: AttentionState, masked: bool, kwargs: dict[str, Any]) -> str:
        window_weights = torch.matmul(state.query, self.learnable_tokens) + self.learnable_bias
        state.attention_kwargs = {"window_weights": window_weights}
        state.query = self.scaled(state.query, kwargs["pixels"].length_scale)
        state.function = "crosshead_aggregated"
        return state.function


def window_shifts(x: Tensor, pixels: FeatureMap, window: int) -> Iterator[Tensor]:
    """Yield, per window position, the features (B, H, N, d) of the pixel at this offset; zeros outside the image."""
    border = window // 2
    padded = functional.pad(x.unflatten(2, (pixels.height, pixels.width)), (0, 0) + 4 * (border,))
    for row in range(window):
        for column in range(window):
            yield padded[:, :, row : row + pixels.height, column : column + pixels.width].flatten(2, 3)


def aggregated_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    window_weights: Tensor | None = None,
    pixels: FeatureMap | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return outputs (B, N, H, d); keys are N pixels, then pooled features; the mask is the position bias.

    `window_weights` (B, H, N, window size ** 2) are added to the window's weights after the softmax.
    """
    if window_weights is None or pixels is None:
        options = {"dropout": dropout, "scaling": scaling, **kwargs}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    tokens, positions = query.shape[2], window_weights.shape[-1]
    window = math.isqrt(positions)
    near = [(query * shifted).sum(-1) for shifted in window_shifts(key[:, :, :tokens], pixels, window)]
    far = torch.matmul(query, key[:, :, tokens:].transpose(2, 3))
    logits = apply_mask(torch.cat([torch.stack(near, dim=-1), far], dim=-1) * scaling, attention_mask)
    weights = functional.softmax(logits, dim=-1).to(query.dtype)
    weights = functional.dropout(weights, p=dropout, training=module.training)
    near_weights = (weights[..., :positions] + window_weights).unsqueeze(-1)
    shifted_values = window_shifts(value[:, :, :tokens], pixels, window)
    output = weigh_values(weights[..., positions:], value[:, :, tokens:])
    for position, shifted in enumerate(shifted_values):
        output = output + (near_weights[..., position, :] * shifted).transpose(1, 2)
    return output, weights


register_backend("crosshead_aggregated", aggregated_attention_forward)
