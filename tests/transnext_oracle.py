"""Reference implementation of TransNeXt with slow loops over pixels and heads, from its paper and MoH's.

It shares no code with modeling/. A feature map is a list of hidden states, row by row. Weights have the names of the
module's parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oracle_arithmetic import LayerShape, Mixers, Weights, add, linear
from oracles import differential, gating, knocking, mixture, paired_queries, talking

Pixels = list[Tensor]
Size = tuple[int, int]
Biases = dict[tuple[float, float], Tensor]
"""Position biases of all heads (heads,), by vertical and horizontal distance."""


@dataclass(frozen=True)
class Attention:
    """The sizes of an attention layer; `pretrained` is the side length of its feature map in pretraining."""

    heads: int
    reduction: int
    window: int
    pretrained: int
    layer: int


def under(weights: Weights, prefix: str) -> dict[str, Tensor]:
    """Return the weights below a prefix, with the prefix removed from their names."""
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def layer_norm(x: Tensor, weights: Weights, name: str, eps: float) -> Tensor:
    centred = x - x.mean()
    normalised = centred / torch.sqrt((centred * centred).mean() + eps)
    return weights[f"{name}.weight"] * normalised + weights[f"{name}.bias"]


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def unit(x: Tensor) -> Tensor:
    return x / torch.sqrt(torch.dot(x, x))


def cells(length: int, count: int) -> list[list[int]]:
    """Return the positions that each cell of adaptive average pooling averages, along one axis."""
    return [list(range(math.floor(i * length / count), math.ceil((i + 1) * length / count))) for i in range(count)]


def position_bias(row: float, column: float, weights: Weights, pretrained: int) -> Tensor:
    """Return the bias of each head (heads,) for a distance: an MLP of its log, scaled so that 8 is the map's side."""
    scaled = [distance / max(pretrained - 1, 1) * 8 for distance in (row, column)]
    logarithmic = [math.copysign(math.log(abs(x) + 1) / math.log(8), x) for x in scaled]
    hidden = linear(torch.tensor(logarithmic, dtype=torch.float64), weights, "cpb_fc1")
    return linear(torch.clamp(hidden, min=0), weights, "cpb_fc2")


def sides(x: Tensor, weights: Weights, heads: int, mixers: Mixers) -> dict[str, list[Tensor]]:
    """Return the query, key and value heads of one hidden state, after `knocking`."""
    heads_by_side = {}
    for side in ("query", "key", "value"):
        name = f"{side[0]}_proj"
        module = next(path for path in (name, f"kv.{name}", f"qkv.{name}") if f"{path}.weight" in weights)
        heads_by_side[side] = list(linear(x, weights, module).chunk(heads))
        if "knocking" in mixers:
            heads_by_side[side] = [knocking(head, side, weights, mixers["knocking"]) for head in heads_by_side[side]]
    return heads_by_side


def pooled_keys(inputs: Pixels, size: Size, weights: Weights, shape: Attention) -> list[tuple[Tensor, float, float]]:
    """Return the pooled features, each with the row and the column of its centre."""
    rows, columns = (max(length // shape.reduction, 1) for length in size)
    pooled = []
    for in_rows in cells(size[0], rows):
        for in_columns in cells(size[1], columns):
            members = [inputs[i * size[1] + j] for i in in_rows for j in in_columns]
            kernel = weights["sr.weight"][:, :, 0, 0]
            mean = add(gelu(kernel @ x + weights["sr.bias"]) for x in members) / len(members)
            centre = sum(in_rows) / len(in_rows), sum(in_columns) / len(in_columns)
            pooled.append((layer_norm(mean, weights, "norm", 1e-5), *centre))
    return pooled


def attention(
    inputs: Pixels, size: Size, weights: Weights, shape: Attention, mixers: Mixers
) -> tuple[Pixels, list[tuple[Tensor, ...]]]:
    """Return the outputs of one layer, and the router results of `mixture` for each pixel."""
    pixels, far, biases = features(inputs, size, weights, shape, mixers)
    outputs, routing = [], []
    for t, x in enumerate(inputs):
        heads = attend(t, inputs, pixels, far, biases, size, weights, shape, mixers)
        for name, options in mixers.items():
            if name == "mixture":
                routing.append(mixture(x, pixels[t]["query"], weights, options))
                heads = [gate * head for gate, head in zip(routing[-1][2], heads, strict=True)]
            if name == "gating":
                heads = gating(heads, x, weights)
        outputs.append(linear(torch.cat(heads), weights, "o_proj"))
    return outputs, routing


def attention_weights(inputs: Pixels, size: Size, weights: Weights, shape: Attention, mixers: Mixers) -> Tensor:
    """Return the attention weights (heads, pixels, keys) of a layer with global attention."""
    pixels, far, biases = features(inputs, size, weights, shape, mixers)
    rows = [weights_of(t, inputs, pixels, far, biases, size, weights, shape, mixers)[2] for t in range(len(inputs))]
    return torch.stack([torch.stack(row) for row in rows], dim=1)


def features(
    inputs: Pixels, size: Size, weights: Weights, shape: Attention, mixers: Mixers
) -> tuple[list[dict[str, list[Tensor]]], list[tuple[dict[str, list[Tensor]], Tensor, float, float]], Biases]:
    """Return the heads of all pixels; heads, input, row and column of all keys outside windows; position biases."""
    pixels = [sides(x, weights, shape.heads, mixers) for x in inputs]
    pooled = [] if shape.reduction == 1 else pooled_keys(inputs, size, weights, shape)
    far = [(sides(x, weights, shape.heads, mixers), x, i, j) for x, i, j in pooled]
    if shape.reduction == 1:
        far = [(pixels[t], inputs[t], *divmod(t, size[1])) for t in range(len(inputs))]
    biases: Biases = {}
    for t in range(len(inputs)):
        for _, _, row, column in far:
            distance = t // size[1] - row, t % size[1] - column
            if distance not in biases:
                biases[distance] = position_bias(*distance, weights, shape.pretrained)
    return pixels, far, biases


def attend(
    t: int,
    inputs: Pixels,
    pixels: list[dict[str, list[Tensor]]],
    far: list[tuple[dict[str, list[Tensor]], Tensor, float, float]],
    biases: Biases,
    size: Size,
    weights: Weights,
    shape: Attention,
    mixers: Mixers,
) -> list[Tensor]:
    """Return the head outputs of pixel `t`, which attends to its window and to the keys of `far`."""
    window, queries, rows = weights_of(t, inputs, pixels, far, biases, size, weights, shape, mixers)
    if "differential" in mixers:
        options, values = mixers["differential"], [key["value"] for key, *_ in far]
        layer = LayerShape(shape.heads, shape.heads, 0, shape.layer, 1e-6, False)
        if options["version"] == 2:
            return paired_queries(rows, values, inputs[t], weights)
        return differential(rows, values, weights, layer, options)
    outputs = []
    for head in range(shape.heads):
        terms = []
        for n, (offset, s) in enumerate(window):
            token = weights["learnable_tokens"][head, :, offset]
            learnt = torch.dot(queries[head], token) + weights["learnable_bias"][head, 0, offset]
            terms.append((rows[head][n] + learnt) * pixels[s]["value"][head])
        terms += [rows[head][len(window) + n] * key["value"][head] for n, (key, *_) in enumerate(far)]
        outputs.append(add(terms))
    return outputs


def weights_of(
    t: int,
    inputs: Pixels,
    pixels: list[dict[str, list[Tensor]]],
    far: list[tuple[dict[str, list[Tensor]], Tensor, float, float]],
    biases: Biases,
    size: Size,
    weights: Weights,
    shape: Attention,
    mixers: Mixers,
) -> tuple[list[tuple[int, int]], list[Tensor], list[Tensor]]:
    """Return pixel `t`'s window as (offset, pixel) pairs, its unit-length queries, and each head's weights."""
    row, column = divmod(t, size[1])
    bias_of = [biases[row - i, column - j] for _, _, i, j in far]
    half = shape.window // 2
    window = []  # (offset in the window, pixel), without offsets outside the feature map
    for offset in range(shape.window**2 if shape.reduction > 1 else 0):
        i, j = row + offset // shape.window - half, column + offset % shape.window - half
        if 0 <= i < size[0] and 0 <= j < size[1]:
            window.append((offset, i * size[1] + j))
    scale = math.log(len(window) + len(far))
    logits, queries = [], []
    for head in range(shape.heads):
        queries.append(unit(pixels[t]["query"][head]))
        embedded = queries[head] + weights["query_embedding"][head, 0]
        query = embedded * torch.log(1 + torch.exp(weights["temperature"][head, 0, 0])) * scale
        near_bias = weights.get("relative_pos_bias_local")
        near = [torch.dot(query, unit(pixels[s]["key"][head])) + near_bias[head, offset] for offset, s in window]
        others = [torch.dot(query, unit(key["key"][head])) + bias_of[n][head] for n, (key, *_) in enumerate(far)]
        logits.append(torch.stack([*near, *others]))
    key_inputs = [x for _, x, _, _ in far]
    rows = mix("logits", logits, inputs[t], key_inputs, weights, mixers)
    rows = mix("weights", [torch.softmax(each, dim=0) for each in rows], inputs[t], key_inputs, weights, mixers)
    return window, queries, rows


def mix(
    side: str, rows: list[Tensor], query_input: Tensor, key_inputs: Pixels, weights: Weights, mixers: Mixers
) -> list[Tensor]:
    """Return the logits or weights after `talking`'s map across heads, key by key."""
    if "talking" not in mixers:
        return rows
    mixed = [
        talking([row[s] for row in rows], side, query_input, x, weights, mixers["talking"])
        for s, x in enumerate(key_inputs)
    ]
    return [torch.stack([each[head] for each in mixed]) for head in range(len(mixed[0]))]


def convolution(maps: Pixels, size: Size, weights: Weights, name: str, stride: int, depthwise: bool) -> Any:
    """Return a zero-padded convolution of a feature map, and the size of its output."""
    kernel, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
    extent = kernel.shape[2]
    made: Size = ((size[0] - 1) // stride + 1, (size[1] - 1) // stride + 1)
    outputs = []
    for row in range(made[0]):
        for column in range(made[1]):
            terms = [bias]
            for a in range(extent):
                for b in range(extent):
                    i, j = row * stride + a - extent // 2, column * stride + b - extent // 2
                    if 0 <= i < size[0] and 0 <= j < size[1]:
                        x = maps[i * size[1] + j]
                        terms.append(kernel[:, 0, a, b] * x if depthwise else kernel[:, :, a, b] @ x)
            outputs.append(add(terms))
    return outputs, made


def mlp(inputs: Pixels, size: Size, weights: Weights) -> Pixels:
    """Return the output of the convolutional GLU."""
    both = [linear(x, weights, "fc1").chunk(2) for x in inputs]
    gates, _ = convolution([gate for gate, _ in both], size, weights, "dwconv.dwconv", 1, True)
    return [linear(gelu(gate) * value, weights, "fc2") for gate, (_, value) in zip(gates, both, strict=True)]


def classifier(image: Tensor, weights: Weights, config: Any) -> tuple[Tensor, list[list[tuple[Tensor, ...]]]]:
    """Return the logits of one image (channels, height, width), and each layer's router results."""
    size: Size = (image.shape[1], image.shape[2])
    hidden = [image[:, i, j] for i in range(size[0]) for j in range(size[1])]
    routing, layer = [], 0
    for stage, depth in enumerate(config.depths):
        embedding = under(weights, f"transnext.patch_embed{stage + 1}.")
        stride = 2 if stage else config.patch_size
        hidden, size = convolution(hidden, size, embedding, "proj", stride, False)
        hidden = [layer_norm(x, embedding, "norm", 1e-5) for x in hidden]
        heads, pretrained = config.num_attention_heads[stage], config.image_size // (config.patch_size * 2**stage)
        for block in range(depth):
            own = under(weights, f"transnext.block{stage + 1}.{block}.")
            shape = Attention(heads, config.sr_ratios[stage], config.window_size, pretrained, layer)
            normed = [layer_norm(x, own, "norm1", config.layer_norm_eps) for x in hidden]
            mixers = config.mixers_of_layer(layer)
            attended, routed = attention(normed, size, under(own, "attn."), shape, mixers)
            routing.append(routed)
            hidden = [x + y for x, y in zip(hidden, attended, strict=True)]
            normed = [layer_norm(x, own, "norm2", config.layer_norm_eps) for x in hidden]
            hidden = [x + y for x, y in zip(hidden, mlp(normed, size, under(own, "mlp.")), strict=True)]
            layer += 1
        hidden = [layer_norm(x, weights, f"transnext.norm{stage + 1}", config.layer_norm_eps) for x in hidden]
    return linear(add(hidden) / len(hidden), weights, "head"), routing
