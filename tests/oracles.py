"""Reference implementations (oracles) of the mechanisms with slow loops, from the papers' equations.

They share no code with crosshead and are not vectorised over batch, tokens or heads. The head vectors of a sequence
are a list of lists, `heads[token][head]`, each entry a vector of the head's size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oracle_arithmetic import (
    Heads,
    LayerShape,
    Mixers,
    Options,
    Sides,
    Weights,
    add,
    combine,
    linear,
    project,
    rms_norm,
    rotate,
    softmax_over_allowed,
)
from oracle_routing import mixture


def knocking(vector: Tensor, side: str, weights: Weights, options: Options) -> Tensor:
    """Knocking-Heads, equations 5 to 11: apply the map that all heads of a side ("query", "key", "value") share."""
    if side not in options["on"]:
        return vector
    name, form = f"mixers.knocking.{side}", options["form"]
    if form == "linear":
        return linear(vector, weights, name)
    gate = torch.sigmoid(linear(vector, weights, f"{name}.gate"))
    if form == "gate":
        return 2 * vector * gate
    if form == "mlp":
        return 2 * linear(linear(vector, weights, f"{name}.up") * gate, weights, f"{name}.down")
    raise ValueError(f"knocking form is {form!r}; known are 'linear', 'mlp', 'gate'")


def explicit(components: list[Tensor], side: str, weights: Weights, options: Options) -> list[Tensor]:
    """MEA, equations 10 and 11: combine one token's component keys or values, `K_i = sum_j C_ij B_j`."""
    if side not in options["on"]:
        return components
    return combine(components, weights[f"mixers.explicit.{side}.weight"], options["groups"])


def talking(
    per_head: list[Tensor], side: str, query_input: Tensor, key_input: Tensor, weights: Weights, options: Options
) -> list[Tensor]:
    """Talking-Heads: mix one query-key pair's logits or weights over heads by a static plus optional dynamic maps."""
    if side not in options["on"]:
        return per_head
    matrix = weights[f"mixers.talking.{side}.weight"]
    for source, source_input in (("query", query_input), ("key", key_input)):
        if f"{source}_{side}" in options["dynamic"]:
            matrix = matrix + linear(source_input, weights, f"mixers.talking.{source}_{side}").reshape(matrix.shape)
    return combine(per_head, matrix)


def differential(
    softmaxes: list[Tensor], values: Heads, weights: Weights, shape: LayerShape, options: Options
) -> list[Tensor]:
    """MEA equations 4 to 6: one query's outputs, one of size 2d for each pair of heads.

    `softmaxes` has the query's weights over the keys (S,) for every head. `lambda_init` is the paper's
    `0.8 - 0.6 exp(-0.3 (layer - 1))` with layers counted from 1. Without the norm there is no factor
    `1 - lambda_init` either. With `half_values`, value heads have size d / 2 and outputs size d.
    """
    lambda_init = 0.8 - 0.6 * math.exp(-0.3 * shape.layer_index)
    name = "mixers.differential.lambda"
    first = torch.exp(torch.dot(weights[f"{name}_q1"], weights[f"{name}_k1"]))
    second = torch.exp(torch.dot(weights[f"{name}_q2"], weights[f"{name}_k2"]))
    subtracted = first - second + lambda_init
    outputs = []
    for pair in range(shape.query_heads // 2):
        source = pair // (shape.query_heads // shape.key_value_heads)
        attention = softmaxes[2 * pair] - subtracted * softmaxes[2 * pair + 1]
        both = [torch.cat([token[2 * source], token[2 * source + 1]]) for token in values]
        output = add(attention[s] * both[s] for s in range(len(both)))
        if options["norm"]:
            output = (1 - lambda_init) * rms_norm(output, shape.norm_eps)
        outputs.append(output)
    return outputs


def paired_queries(softmaxes: list[Tensor], values: Heads, query_input: Tensor, weights: Weights) -> list[Tensor]:
    """Differential attention version 2: one query's outputs, one of size d for each pair of query heads.

    Both heads of a pair use the same value head; the second output, times a sigmoid of the input, is subtracted.
    """
    name = "mixers.differential.lambda"
    factors = torch.sigmoid(linear(query_input, weights, f"{name}_proj") + weights[f"{name}_bias"])
    group = len(softmaxes) // len(values[0])
    outputs = []
    for pair, factor in enumerate(factors):
        first, second = (
            add(softmaxes[head][s] * values[s][head // group] for s in range(len(values)))
            for head in (2 * pair, 2 * pair + 1)
        )
        outputs.append(first - factor * second)
    return outputs


def bilinear(inputs: Tensor, source: Tensor, p: Tensor, q: Tensor, allowed: Tensor, bias: Tensor) -> Tensor:
    """GBMA, section 6 of Talking-Heads: outputs (T, d_Y) of one sequence.

    `p` is (d_X, d_M, h), `q` (d_M, d_Y, h), `allowed` (T, S), `bias` (h, T, S).
    """
    outputs = []
    for t in range(inputs.shape[0]):
        output = inputs.new_zeros(q.shape[1])
        for head in range(p.shape[2]):
            logits = [inputs[t] @ p[:, :, head] @ source[s] + bias[head, t, s] for s in range(source.shape[0])]
            row = softmax_over_allowed(torch.stack(logits), allowed[t])
            output = output + add(row[s] * (source[s] @ q[:, :, head]) for s in range(source.shape[0]))
        outputs.append(output)
    return torch.stack(outputs)


def gating(outputs: list[Tensor], token_input: Tensor, weights: Weights) -> list[Tensor]:
    """Headwise gates: each head's output times `2 sigmoid(x G)`; the factor 2 is crosshead's own."""
    gates = 2 * torch.sigmoid(weights["mixers.gating.gate.weight"] @ token_input)
    return [gate * output for gate, output in zip(gates, outputs, strict=True)]


def attend(
    t: int,
    inputs: Tensor,
    sides: Sides,
    weights: Weights,
    shape: LayerShape,
    mixers: Mixers,
    allowed: Tensor,
    key_inputs: Tensor,
    bias: Tensor | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the head outputs of query token `t`, and each head's weights (S,) that multiply the values."""
    queries, keys, values = sides["query"], sides["key"], sides["value"]
    group = shape.query_heads if "bilinear" in mixers else shape.query_heads // shape.key_value_heads
    version = mixers["differential"]["version"] if "differential" in mixers else 0

    pairs = []  # one list of per-head logits for every key
    for s in range(len(keys)):
        logits = []
        for head in range(shape.query_heads):
            read = 2 * (head // 2 // group) + head % 2 if version == 1 else head // group
            logit = torch.dot(queries[t][head], keys[s][read])
            logit = logit / math.sqrt(shape.head_dim) if shape.is_scaled else logit
            logits.append(logit if bias is None else logit + bias[head, t, s])
        if "talking" in mixers:
            logits = talking(logits, "logits", inputs[t], key_inputs[s], weights, mixers["talking"])
        pairs.append(logits)

    rows = []  # one vector of weights over the keys for every softmax head
    for head in range(len(pairs[0])):
        rows.append(softmax_over_allowed(torch.stack([logits[head] for logits in pairs]), allowed[t]))
    if "talking" in mixers:  # before differential's subtraction: the map is over H heads, not over H/2 pairs
        mixed = []
        for s in range(len(keys)):
            per_head = [row[s] for row in rows]
            mixed.append(talking(per_head, "weights", inputs[t], key_inputs[s], weights, mixers["talking"]))
        rows = [torch.stack([mixed[s][head] for s in range(len(keys))]) for head in range(shape.query_heads)]

    if version == 2:
        return paired_queries(rows, values, inputs[t], weights), rows
    if version == 1:
        return differential(rows, values, weights, shape, mixers["differential"]), rows
    heads = range(shape.query_heads)
    return [add(rows[head][s] * values[s][head // group] for s in range(len(values))) for head in heads], rows


def project_sides(inputs: Tensor, source: Tensor, weights: Weights, shape: LayerShape, mixers: Mixers) -> Sides:
    """Return projected queries of the inputs, and keys and values of the source (unprojected for `bilinear`)."""
    if "bilinear" in mixers:
        tokens = [[token] for token in source]
        return {"query": project(inputs, weights, "q_proj", inputs.shape[1]), "key": tokens, "value": tokens}
    value_dim = shape.head_dim // 2 if mixers.get("differential", {}).get("half_values") else shape.head_dim
    return {
        "query": project(inputs, weights, "q_proj", shape.head_dim),
        "key": project(source, weights, "k_proj", shape.head_dim),
        "value": project(source, weights, "v_proj", value_dim),
    }


def sequence_layer(
    inputs: Tensor,
    weights: Weights,
    shape: LayerShape,
    mixers: Mixers,
    cos: Tensor | None,
    sin: Tensor | None,
    allowed: Tensor,
    source: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`attention_layer` for one sequence: every argument and result without its batch dimension."""
    source = inputs if source is None else source
    sides = project_sides(inputs, source, weights, shape, mixers)

    router_queries = sides["query"]
    for name, options in mixers.items():
        if name == "knocking":
            for side in sides:
                sides[side] = [[knocking(v, side, weights, options) for v in token] for token in sides[side]]
        if name == "mixture":
            router_queries = sides["query"]
    if "explicit" in mixers:  # the definition: combine the raw components, then normalise, then rotate
        for side in ("key", "value"):
            sides[side] = [explicit(token, side, weights, mixers["explicit"]) for token in sides[side]]
    for side in ("query", "key"):
        if shape.has_qk_norm:
            scale = weights[f"{side[0]}_norm.weight"]
            sides[side] = [[rms_norm(vector, shape.norm_eps, scale) for vector in token] for token in sides[side]]
        if cos is not None and sin is not None:
            sides[side] = [[rotate(vector, cos[t], sin[t]) for vector in token] for t, token in enumerate(sides[side])]
    return read_out(inputs, source, sides, router_queries, weights, shape, mixers, allowed, bias)


def read_out(
    inputs: Tensor,
    key_inputs: Tensor,
    sides: Sides,
    router_queries: Heads,
    weights: Weights,
    shape: LayerShape,
    mixers: Mixers,
    allowed: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a layer's output and extras from its final queries, keys and values; a router reads `router_queries`."""
    if "differential" in mixers:  # routing is per pair of heads: its query is the concatenation of both queries
        router_queries = [[torch.cat(token[i : i + 2]) for i in range(0, len(token), 2)] for token in router_queries]
    results, used, routing = [], [], []
    for t in range(inputs.shape[0]):
        outputs, rows = attend(t, inputs, sides, weights, shape, mixers, allowed, key_inputs, bias)
        for name, options in mixers.items():
            if name == "explicit" and options["norm"]:
                scale = weights["mixers.explicit.norm.weight"]
                outputs = [rms_norm(output, shape.norm_eps, scale) for output in outputs]
            if name == "mixture":
                routing.append(mixture(inputs[t], router_queries[t], weights, options))
                outputs = [gate * output for gate, output in zip(routing[t][2], outputs, strict=True)]
            if name == "gating":
                outputs = gating(outputs, inputs[t], weights)
        results.append(linear(torch.cat(outputs), weights, "o_proj"))
        used.append(torch.stack(rows))  # (H, S)
    extras = {"weights": torch.stack(used, dim=1)}
    if "mixture" in mixers:
        for i, name in enumerate(("probabilities", "selected", "gates")):
            extras[name] = torch.stack([token[i] for token in routing])
    return torch.stack(results), extras


def attention_layer(
    inputs: Tensor,
    weights: Weights,
    shape: LayerShape,
    mixers: Mixers,
    cos: Tensor | None,
    sin: Tensor | None,
    allowed: Tensor,
    source: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output (B, T, hidden) of one attention layer with its mechanisms, and intermediate results (extras).

    `inputs` is (B, T, hidden); `weights` has the state dict's names relative to the attention module; `mixers` maps
    a mechanism to its complete options, in the order of the config; `cos` and `sin` are (B, T, d); `allowed` is
    (B, T, S) and True where a query may attend to a key; `source` (B, S, hidden) is the key/value input of
    cross-attention; `bias` (H, T, S) is added to the logits. The extras are "weights" (B, H, T, S) and, with
    `mixture`, "probabilities" and "selected" (B, T, R) and "gates" (B, T, heads).
    """
    batch = range(inputs.shape[0])
    results = []
    for b in batch:
        sequence_inputs = [None if x is None else x[b] for x in (cos, sin, source)]
        options = {"source": sequence_inputs[2], "bias": bias}
        results.append(sequence_layer(inputs[b], weights, shape, mixers, *sequence_inputs[:2], allowed[b], **options))
    extras = {name: torch.stack([results[b][1][name] for b in batch]) for name in results[0][1]}
    return torch.stack([results[b][0] for b in batch]), extras


ORACLES: dict[str, Callable[..., Any]] = {
    "knocking": knocking,
    "explicit": explicit,
    "mixture": mixture,
    "talking": talking,
    "differential": differential,
    "gating": gating,
    "bilinear": bilinear,
}
