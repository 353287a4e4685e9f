"""Whole layers of random shapes under SDPA: folded linear knocks and differential heads, by the oracle and plainly."""

import random
from functools import partial
from typing import Any

import pytest
import torch

from crosshead.modeling import mixed_attention
from oracle_layers import GRADIENT_TOLERANCE, OUTPUT_TOLERANCE, Layer, additive, assert_layer_agrees, rope_tables
from toys import SIZES, lopsided

HEADS = {"knocking": ((1, 1), (2, 1), (3, 3), (4, 2), (6, 2)), "differential": ((2, 2), (4, 2), (4, 4), (8, 2))}
"""Of queries, and of keys and values."""
SIDES = ("query", "key", "value")
MASKS = ("none", "left", "right", "window", "documents")
HALF = 0.02
"""What bfloat16 may be off by, beside the size of the output, and twice what the plain path is off by."""


def drawn_mixers(name: str, draw: random.Random) -> dict[str, Any]:
    if name == "differential":
        return {name: {"norm": draw.random() < 0.5}}
    return {name: {"form": "linear", "on": [*filter(lambda _: draw.random() < 0.5, SIDES)] or ["value"]}}


def drawn_mask(kind: str, batch: int, length: int, draw: random.Random) -> torch.Tensor:
    """(B, T, S); each sequence has a real token."""
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
    """Sizes, weights, inputs and a mask from a seed."""

    def __init__(self, name: str, seed: int) -> None:
        draw, heads = random.Random(f"{name} {seed}"), HEADS[name]
        queries, keys = draw.choice(heads)
        sizes = {"num_attention_heads": queries, "num_key_value_heads": keys}
        super().__init__(draw.choice(("Llama", "Qwen2", "Qwen3")), drawn_mixers(name, draw), (0, 0), **sizes)
        lopsided(self.attention, seed)
        batch, length, kind = draw.randint(1, 2), draw.choice((1, 1, 2, 3, 5, 6)), draw.choice(MASKS)
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(batch, length, self.inputs.shape[-1], generator=generator, dtype=torch.float64)
        self.allowed = drawn_mask(kind, batch, length, draw)
        self.mask = None if kind == "none" else self.allowed[:, None]
        self.rows = self.allowed.any(-1)
        self.cos, self.sin = rope_tables(torch.arange(length).expand(batch, -1), SIZES["head_dim"])

    def run(self, backend: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """The output."""
        self.attention.config._attn_implementation = backend
        mask = additive(self.allowed) if backend == "eager" else self.mask
        tables = (self.cos.to(dtype), self.sin.to(dtype))
        output: torch.Tensor = self.attention(self.inputs.to(dtype), tables, mask)[0]
        return output

    def plain(self, name: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """The output without what makes it fast."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mixed_attention, "folds", lambda *_: False)
            return self.run("eager" if name == "differential" else "sdpa", dtype)


def assert_plain_agrees(layer: RandomLayer, name: str) -> None:
    """In outputs and in every gradient."""
    fast, plain = layer.run("sdpa"), layer.plain(name)
    assert (fast - plain)[layer.rows].abs().max() < OUTPUT_TOLERANCE
    expected = layer.gradients(plain)
    for part, found in layer.gradients(fast).items():
        assert (found - expected[part]).abs().max() < GRADIENT_TOLERANCE, part


@torch.no_grad()
def assert_agrees_without_gradients(layer: RandomLayer, name: str) -> None:
    """What is folded is kept, and is the same again; half precision is as near as the plain path's."""
    truth = layer.truth()[0][layer.rows]
    for _ in range(2):
        assert (layer.run("sdpa")[layer.rows] - truth).abs().max() < OUTPUT_TOLERANCE
    if name == "knocking":
        on = layer.mixers["knocking"]["on"]
        assert [side for side in SIDES if layer.attention._folded[side]._weight is not None] == [*on]
    layer.attention.bfloat16()
    halves = layer.run("sdpa", torch.bfloat16), layer.plain(name, torch.bfloat16)
    ours, plain = ((half[layer.rows] - truth).norm() for half in halves)
    assert ours < 2 * plain + HALF * truth.norm()


@pytest.mark.parametrize("first", range(0, 500, 50))
@pytest.mark.parametrize("name", HEADS)
def test_random_layers(name: str, first: int) -> None:
    for seed in range(first, first + 50):
        layer = RandomLayer(name, seed)
        assert_layer_agrees(layer, partial(layer.run, "sdpa"), least=1e-4)
        assert_plain_agrees(layer, name)
        assert_agrees_without_gradients(layer, name)
