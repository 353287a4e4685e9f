"""Layers of random shapes: "sdpa" and "eager" agree with the oracle, and with each other in half precision."""

import random
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch

from crosshead.modeling.mechanisms import talking_blocks
from oracle_layers import OUTPUT_TOLERANCE, Layer, additive, assert_layer_agrees, rope_tables
from tiers import first
from toys import SIZES, lopsided

FREE = ((1, 1), (2, 1), (3, 3), (4, 2), (6, 2))
HEADS = {
    "knocking": FREE,
    "knocking mlp": FREE,
    "explicit": (*FREE, (8, 4)),
    "mixture": ((2, 1), (2, 2), (3, 3), (4, 2), (6, 2)),
    "differential": ((2, 2), (4, 2), (4, 4), (8, 2)),
    "talking": FREE,
}
"""Pairs (query heads, key/value heads), by mechanism and, for knocking, its form."""
DYNAMIC = ("query_logits", "key_logits", "query_weights", "key_weights")
SIDES = ("query", "key", "value")
STAGES = ("logits", "weights")
MASKS = ("none", "left", "right", "window", "documents")
HALF = 0.02
"""Relative error allowed in bfloat16, in addition to three times the error of eager attention."""


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink the blocks so that toy sequences have several."""
    monkeypatch.setattr(talking_blocks, "TALKING_CPU_BLOCKS", (2**23, 1, 1, 2))


def random_subset(names: Iterable[str], draw: random.Random) -> list[str]:
    return [name for name in names if draw.random() < 0.5]


def random_options(name: str, heads: int, groups: int, draw: random.Random) -> dict[str, Any]:
    if name.startswith("knocking"):
        return {"form": name.partition(" ")[2] or "linear", "on": random_subset(SIDES, draw) or ["value"]}
    if name == "explicit":
        on = random_subset(SIDES[1:], draw) or ["key", "value"]
        cut = draw.choice([count for count in range(1, groups + 1) if groups % count == 0])
        counts = {f"{side}_heads": cut * draw.randint(1, groups // cut) for side in on}
        # The norm cancels the only scalar of a head, so its gradient would be pure rounding error.
        norm = draw.random() < 0.5 and counts.get("value_heads") != cut
        return {"on": on, "norm": norm, "groups": cut} | counts
    if name == "mixture":
        shared = draw.randint(0, heads - 2)
        options = {
            "router": ("two_stage", "query_norm"),
            "gate": ("weighted", "binary"),
            "gate_scale": ("unit", "paper"),
        }
        counts = {"shared_heads": shared, "active_heads": draw.randint(shared + 1, heads)}
        return counts | {option: draw.choice(values) for option, values in options.items()}
    if name == "differential":
        return {"norm": draw.random() < 0.5}
    on = random_subset(STAGES, draw) or [*STAGES]
    options = {
        "on": on,
        "dynamic": random_subset((kind for kind in DYNAMIC if kind.split("_")[1] in on), draw),
    }
    return options | {"softmax_heads": draw.choice((heads, 1, heads + 1)) if len(on) == 2 else heads}


def random_mask(kind: str, batch: int, length: int, draw: random.Random) -> torch.Tensor:
    """Return a random causal mask (B, T, S) with at least one real token per sequence."""
    allowed = torch.ones(batch, length, length, dtype=torch.bool).tril()
    for row in allowed:
        if kind == "left":
            row[:, : draw.randrange(length)] = False
        elif kind == "right":
            row[:, draw.randint(1, length) :] = False
        elif kind == "window":
            row.triu_(-draw.randint(0, 3))
        elif kind == "documents":
            begin = draw.randrange(length)
            row[begin:, :begin] = False
    return allowed


class RandomLayer(Layer):
    """A layer with random sizes, options, weights, inputs and mask, determined by a seed."""

    def __init__(self, name: str, seed: int) -> None:
        draw, heads = random.Random(f"{name} {seed}"), HEADS[name]
        queries, keys = draw.choice(heads)
        sizes = {"num_attention_heads": queries, "num_key_value_heads": keys}
        mixers = {name.split()[0]: random_options(name, queries, keys, draw)}
        super().__init__(draw.choice(("Llama", "Qwen2", "Qwen3")), mixers, (0, 0), **sizes)
        lopsided(self.attention, seed)
        batch, length, kind = draw.randint(1, 2), draw.choice((1, 1, 2, 3, 5, 6)), draw.choice(MASKS)
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(batch, length, self.inputs.shape[-1], generator=generator, dtype=torch.float64)
        self.allowed = random_mask(kind, batch, length, draw)
        self.mask = None if kind == "none" else self.allowed[:, None]
        self.rows = self.allowed.any(-1)
        self.cos, self.sin = rope_tables(torch.arange(length).expand(batch, -1), SIZES["head_dim"])

    def run(self, backend: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Return the layer's output (B, T, hidden)."""
        self.attention.config._attn_implementation = backend
        mask = self.mask
        if backend == "eager":
            mask = additive(self.allowed).clamp(min=torch.finfo(dtype).min).to(dtype)
        tables = (self.cos.to(dtype), self.sin.to(dtype))
        output: torch.Tensor = self.attention(self.inputs.to(dtype), tables, mask)[0]
        return output


@torch.no_grad()
def assert_agrees_without_gradients(layer: RandomLayer) -> None:
    """Assert that the outputs agree with the oracle without gradients, as in decoding."""
    truth = layer.truth()[0][layer.rows]
    assert (layer.run("sdpa")[layer.rows] - truth).abs().max() < OUTPUT_TOLERANCE


def assert_as_near_in_half_precision(layer: RandomLayer) -> None:
    """Assert that bfloat16 outputs and gradients are about as accurate as those of eager attention."""
    truths = output_and_gradients(layer, layer.truth()[0])
    layer.attention.bfloat16()
    outcomes = (output_and_gradients(layer, layer.run(backend, torch.bfloat16)) for backend in ("sdpa", "eager"))
    for truth, ours, plain in zip(truths, *outcomes, strict=True):
        assert (ours - truth).norm() < 3 * (plain - truth).norm() + HALF * truth.norm()


def output_and_gradients(layer: RandomLayer, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and all gradients, each as one flat vector."""
    gradients = layer.gradients(output).values()
    return output[layer.rows].flatten(), torch.cat([gradient.flatten().double() for gradient in gradients])


@pytest.mark.parametrize("seeds", first([range(4), *(range(at, at + 50) for at in range(0, 500, 50))]))
@pytest.mark.parametrize("name", HEADS)
def test_random_layers_follow_the_oracle(name: str, seeds: range) -> None:
    for seed in seeds:
        layer = RandomLayer(name, seed)
        for backend in ("sdpa", "eager"):
            assert_layer_agrees(layer, partial(layer.run, backend), least=1e-4)
        assert_agrees_without_gradients(layer)
        assert_as_near_in_half_precision(layer)
