"""Types and single-vector arithmetic shared by the oracles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Options = Mapping[str, Any]
Mixers = Mapping[str, Options]
Weights = Mapping[str, Tensor]
Heads = list[list[Tensor]]  # [token][head], each (d,)
Sides = dict[str, Heads]  # "query", "key", "value"


@dataclass(frozen=True)
class LayerShape:
    """The sizes of one attention layer. `layer_index` counts from 0; `norm_eps` is the eps of every RMSNorm.

    Logits are divided by the square root of the head size if `is_scaled`.
    """

    query_heads: int
    key_value_heads: int
    head_dim: int
    layer_index: int
    norm_eps: float
    has_qk_norm: bool
    is_scaled: bool = True


def linear(vector: Tensor, weights: Weights, name: str) -> Tensor:
    """Return `W x`, plus the bias where the layer has one."""
    result = weights[f"{name}.weight"] @ vector
    return result + weights[f"{name}.bias"] if f"{name}.bias" in weights else result


def project(inputs: Tensor, weights: Weights, name: str, head_dim: int) -> Heads:
    """Project every token of one sequence and cut the result into heads."""
    return [list(linear(token, weights, name).split(head_dim)) for token in inputs]


def add(terms: Iterable[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape."""
    return torch.stack(list(terms)).sum(dim=0)


def rms_norm(vector: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """Return `w * x / sqrt(mean(x^2) + eps)`, or without `w` if the weight is None."""
    normalised = vector / torch.sqrt((vector * vector).mean() + eps)
    return normalised if weight is None else weight * normalised


def rotate(vector: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return one head's vector with RoPE applied; feature i is paired with feature i + d/2."""
    half = vector.shape[0] // 2
    return vector * cos + torch.cat([-vector[half:], vector[:half]]) * sin


def combine(heads: list[Tensor], matrix: Tensor, groups: int = 1) -> list[Tensor]:
    """Return `new_i = sum_j matrix_ij heads_j` of one token or query-key pair; j counts within the group of i."""
    rows, columns = matrix.shape
    return [add(matrix[i, j] * heads[i * groups // rows * columns + j] for j in range(columns)) for i in range(rows)]


def softmax_over_allowed(logits: Tensor, allowed: Tensor) -> Tensor:
    """Softmax of one query's logits over its allowed keys; uniform weights if no key is allowed."""
    if not bool(allowed.any()):
        return torch.full_like(logits, 1.0 / logits.shape[0])
    return torch.softmax(logits.masked_fill(~allowed, -math.inf), dim=0)
