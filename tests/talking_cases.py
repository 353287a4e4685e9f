"""Random Talking-Heads attention calls, compared with plain (eager) attention; shared by all backends' tests."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from crosshead.modeling.mechanisms.base import AttentionState, HeadLayout
from crosshead.modeling.mechanisms.talking import Talking, TalkingRules
from toys import lopsided

HIDDEN = 6
DYNAMIC = TalkingRules.options["dynamic"].allowed
STAGES = (["logits", "weights"], ["logits"], ["weights"])


@dataclass(frozen=True)
class Ranges:
    """Values from which random sizes are drawn."""

    batches: Sequence[int]
    shared: Sequence[int]
    """Query heads per key/value head."""
    features: Sequence[int]
    lengths: Sequence[int]


class Drawn:
    """A random attention call, in float64."""

    implementation = "crosshead_talking_triton"

    def __init__(self, seed: int, ranges: Ranges) -> None:
        draw, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.batch, self.groups = draw.choice(ranges.batches), draw.choice((1, 2, 3))
        self.heads, self.size = self.groups * draw.choice(ranges.shared), draw.choice(ranges.features)
        self.queries = draw.choice(ranges.lengths)
        self.keys = self.queries + draw.choice((0, 0, 4))
        on = draw.choice(STAGES)
        softmax_heads = draw.choice((self.heads, 1, self.heads + 1)) if len(on) == 2 else self.heads
        allowed = [name for name in DYNAMIC if name.split("_")[1] in on]
        dynamic = draw.sample(allowed, draw.choice((0, 0, 1, len(allowed))))
        layout = HeadLayout(HIDDEN, self.heads, self.groups, self.size, output_heads=self.heads)
        settings = {"on": on, "softmax_heads": softmax_heads, "dynamic": dynamic}
        self.module: Any = lopsided(Talking(layout, settings)).double()
        query = self.normal(self.batch, self.heads, self.queries, self.size)
        self.inputs = {
            "hidden_states": self.normal(self.batch, self.queries, HIDDEN),
            "key_value_input": self.normal(self.batch, self.keys, HIDDEN),
            "query": query.transpose(1, 2).contiguous().transpose(1, 2) if draw.random() < 0.5 else query,
            "key": self.normal(self.batch, self.groups, self.keys, self.size),
            "value": self.normal(self.batch, self.groups, self.keys, self.size),
        }
        self.causal = draw.random() < 0.7
        self.mask = MASKS[draw.choice(list(MASKS))](self)
        if self.mask is not None and draw.random() < 0.4:
            added = self.normal(*self.mask.shape).float() if draw.random() < 0.5 else torch.zeros(self.mask.shape)
            self.mask = added.masked_fill(~self.mask, torch.finfo(torch.float32).min)
        self.direction = self.normal(self.batch, self.queries, self.heads, self.size)

    def normal(self, *shape: int) -> torch.Tensor:
        """Return normal random numbers from this call's generator."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def run(self, eager: bool, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
        """Return the output and all gradients; eager attention gets an explicit mask if `is_causal` implies one."""
        inputs = {name: x.to(dtype, copy=True).requires_grad_() for name, x in self.inputs.items()}
        module, mask = self.module.to(dtype), self.mask
        if mask is None and eager and self.causal and self.queries > 1:
            mask = torch.ones(1, 1, self.queries, self.keys, dtype=torch.bool).tril()
        state = AttentionState(**inputs)
        module.before_rope(state)
        name = module.attention_function(state, "eager" if eager else self.implementation, mask is not None)
        layer = SimpleNamespace(is_causal=self.causal, training=False)
        heads, options = (state.query, state.key, state.value), {"scaling": self.size**-0.5, **state.attention_kwargs}
        output, weights = ALL_ATTENTION_FUNCTIONS[name](layer, *heads, mask, **options)
        assert (weights is None) is not eager
        leaves = inputs | dict(module.named_parameters())
        gradients = torch.autograd.grad(output, list(leaves.values()), self.direction.to(dtype), allow_unused=True)
        return {"output": output.detach()} | {
            name: torch.zeros_like(leaves[name]) if grad is None else grad
            for name, grad in zip(leaves, gradients, strict=True)
        }

    def agrees(self, dtype: torch.dtype, tolerance: float) -> None:
        """Assert that outputs and gradients equal those of eager attention in float64 within a tolerance."""
        expected, result = self.run(eager=True), self.run(eager=False, dtype=dtype)
        for name, expected_value in expected.items():
            assert (result[name] - expected_value).abs().max() < tolerance * (1 + expected_value.abs().max()), name

    def is_as_near(self, dtype: torch.dtype) -> None:
        """Assert that errors against float64 are at most those of eager attention in the same dtype, plus a margin."""
        exact = self.run(eager=True)
        plain, result = (self.run(eager, dtype) for eager in (True, False))
        for name, reference in exact.items():
            assert result[name].dtype == dtype
            scale = reference.norm() + 1e-3
            assert (result[name] - reference).norm() < 1.5 * (plain[name] - reference).norm() + 0.02 * scale, name


def causal(drawn: Drawn) -> torch.Tensor:
    """Return a causal mask (1, 1, T, S), aligned so that the last query attends to every key."""
    return torch.ones(1, 1, drawn.queries, drawn.keys, dtype=torch.bool).tril(drawn.keys - drawn.queries)


def padded(drawn: Drawn, left: bool) -> torch.Tensor:
    """Return a causal mask with random padding on one side and at least one real token per sequence."""
    counts = torch.randint(0, drawn.keys, (drawn.batch, 1), generator=drawn.generator)
    real = torch.arange(drawn.keys) >= counts
    return causal(drawn) & (real if left else real.flip(1))[:, None, None, :]


def documents(drawn: Drawn) -> torch.Tensor:
    """Return a causal mask for packed documents: a token attends to its own document only."""
    document = (torch.rand(drawn.batch, drawn.keys, generator=drawn.generator) < 0.3).cumsum(-1)
    return causal(drawn) & (document[:, None, -drawn.queries :, None] == document[:, None, None, :])


MASKS: dict[str, Callable[[Drawn], torch.Tensor | None]] = {
    "none": lambda drawn: None,
    "causal": causal,
    "padding on the left": lambda drawn: padded(drawn, True),
    "padding on the right": lambda drawn: padded(drawn, False),
    "documents": documents,
    "window": lambda drawn: causal(drawn).triu(drawn.keys - drawn.queries - 3),
    "by head": lambda drawn: drawn.normal(1, drawn.module.sizes["logits"][0], drawn.queries, drawn.keys) > 0,
    "nothing": lambda drawn: torch.zeros(drawn.batch, 1, 1, drawn.keys, dtype=torch.bool),
}
