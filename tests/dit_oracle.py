"""Reference implementation of DiT in float64, token by token, from the papers (Peebles & Xie 2023; MoH).

It shares no code with modeling/. Weights have the names of diffusers.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import oracles
from oracle_arithmetic import LayerShape, Weights, linear

FREQUENCIES = 256
"""Features of the sinusoidal timestep embedding."""
ATTENTION = {"q_proj": "to_q", "k_proj": "to_k", "v_proj": "to_v", "o_proj": "to_out.0", "mixers": "processor.mixers"}


def below(weights: Weights, prefix: str) -> dict[str, Tensor]:
    """Return the weights below a prefix, with the prefix removed from their names."""
    return {
        name.removeprefix(f"{prefix}."): weight for name, weight in weights.items() if name.startswith(f"{prefix}.")
    }


def norm(vector: Tensor, eps: float) -> Tensor:
    """Return LayerNorm without affine weights."""
    centred = vector - vector.mean()
    return centred / torch.sqrt((centred * centred).mean() + eps)


def silu(vector: Tensor) -> Tensor:
    """Return `x sigmoid(x)`."""
    return vector / (1 + torch.exp(-vector))


def gelu(vector: Tensor) -> Tensor:
    """Return the tanh approximation of GELU."""
    return 0.5 * vector * (1 + torch.tanh(math.sqrt(2 / math.pi) * (vector + 0.044715 * vector**3)))


def condition(time: int, label: int, weights: Weights) -> Tensor:
    """Return the embedding of a timestep and a class. Angles are in float32, like in diffusers."""
    half = FREQUENCIES // 2
    angles = time * torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32) / (half - 1))
    waves = torch.cat([torch.cos(angles), torch.sin(angles)]).double()
    embedded = linear(
        silu(linear(waves, weights, "timestep_embedder.linear_1")), weights, "timestep_embedder.linear_2"
    )
    return embedded + weights["class_embedder.embedding_table.weight"][label]


def attention(
    tokens: Tensor, weights: Weights, heads: int, mixers: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output of unmasked self-attention without RoPE (T, hidden), and its routing."""
    length, size = tokens.shape[0], tokens.shape[1] // heads
    named = {
        f"{ours}{name.removeprefix(theirs)}": weight
        for ours, theirs in ATTENTION.items()
        for name, weight in weights.items()
        if name.startswith(f"{theirs}.")
    }
    shape = LayerShape(heads, heads, size, 0, 1e-6, has_qk_norm=False)
    cos, sin = torch.ones(length, size, dtype=torch.float64), torch.zeros(length, size, dtype=torch.float64)
    allowed = torch.ones(length, length, dtype=torch.bool)
    return oracles.sequence_layer(tokens, named, shape, mixers, cos, sin, allowed)


def block(
    tokens: Tensor, time: int, label: int, weights: Weights, heads: int, mixers: Mapping[str, Any], eps: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output of one AdaLN-zero block, and its routing.

    Six vectors, computed from the condition, shift, scale and gate the attention and the MLP branch.
    """
    modulation = linear(silu(condition(time, label, below(weights, "norm1.emb"))), weights, "norm1.linear")
    shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = modulation.split(tokens.shape[1])
    inputs = torch.stack([norm(token, 1e-6) * (1 + scale_1) + shift_1 for token in tokens])
    attended, routing = attention(inputs, below(weights, "attn1"), heads, mixers)
    results = []
    for t in range(tokens.shape[0]):
        token = tokens[t] + gate_1 * attended[t]
        hidden = norm(token, eps) * (1 + scale_2) + shift_2
        fed_forward = linear(gelu(linear(hidden, weights, "ff.net.0.proj")), weights, "ff.net.2")
        results.append(token + gate_2 * fed_forward)
    return torch.stack(results), routing


def position(row: int, column: int, size: int) -> Tensor:
    """Return the position embedding: sines and cosines of the column, then of the row, rounded to float32."""
    parts = []
    for coordinate in (column, row):
        angles = [coordinate / 10000 ** (4 * i / size) for i in range(size // 4)]
        parts += [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
    return torch.tensor(parts, dtype=torch.float64).float().double()


def model(
    image: Tensor, time: int, label: int, weights: Weights, config: Any, mixers: list[Mapping[str, Any]]
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Return the prediction for one latent (channels, size, size), and the routing of each block."""
    patch, heads = config.patch_size, config.num_attention_heads
    side, size = config.sample_size // patch, heads * config.attention_head_dim
    tokens = []
    for row in range(side):
        for column in range(side):
            pixels = image[:, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
            kernel, bias = weights["pos_embed.proj.weight"], weights["pos_embed.proj.bias"]
            embedded = torch.stack([(kernel[i] * pixels).sum() + bias[i] for i in range(size)])
            tokens.append(embedded + position(row, column, size))
    sequence, routing = torch.stack(tokens), []
    for index in range(config.num_layers):
        part = below(weights, f"transformer_blocks.{index}")
        sequence, block_routing = block(sequence, time, label, part, heads, mixers[index], config.norm_eps)
        routing.append(block_routing)
    conditioned = condition(time, label, below(weights, "transformer_blocks.0.norm1.emb"))
    shift, scale = linear(silu(conditioned), weights, "proj_out_1").split(size)
    channels = config.out_channels or config.in_channels
    output = image.new_zeros(channels, config.sample_size, config.sample_size)
    pieces = [linear(norm(token, 1e-6) * (1 + scale) + shift, weights, "proj_out_2") for token in sequence]
    for row in range(side):
        for column in range(side):
            piece = pieces[row * side + column].reshape(patch, patch, channels)
            for y in range(patch):
                for x in range(patch):
                    output[:, row * patch + y, column * patch + x] = piece[y, x]
    return output, routing
