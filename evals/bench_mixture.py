"""`mixture` that skips work beside all of the work: attention alone, its training step, and a whole model's prefill.

Attention is given the same queries, keys and values as torch's dense causal kernel, and routes drawn at random, which
is how a router starts. The model's rival is the stock one of the same shape, whose heads all count.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM

from crosshead.modeling.mixer import AttentionCall
from crosshead.modeling.modeling_crosshead import CrossheadLlamaForCausalLM
from crosshead.modeling.routed_attention import routed_attention

HEADS, SIZE = 16, 64
SHAPE: dict[str, Any] = {
    "hidden_size": HEADS * SIZE,
    "intermediate_size": 2816,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
}
Pair = tuple[Callable[[], object], Callable[[], object]]
"""Ours and the rival."""


@dataclass(frozen=True)
class Case:
    """What is measured: how many tokens, and how many of the heads count, some of them always."""

    what: str
    """"forward" or "forward and backward" of attention, or "prefill" of a model."""
    length: int
    active: int
    shared: int

    @property
    def name(self) -> str:
        """As a row of a table starts."""
        return f"{self.what}, {self.length} tokens, {self.active} of {HEADS} heads, {self.shared} shared"

    def pair(self) -> Pair:
        """Both sides, ready to be timed."""
        return MAKERS[self.what](self)


CASES = (
    Case("forward", 2048, 8, 4),
    Case("forward", 4096, 8, 4),
    Case("forward", 2048, 8, 0),
    Case("forward", 4096, 8, 0),
    Case("forward", 2048, 12, 6),
    Case("forward", 4096, 12, 6),
    Case("forward and backward", 2048, 8, 4),
    Case("forward and backward", 4096, 8, 4),
    Case("prefill", 4096, 8, 4),
)


def attention_pair(case: Case) -> Pair:
    """Attention without gradients."""
    query, key, value = _inputs(case)
    chosen, call = _routes(case), _call()

    def ours() -> object:
        with torch.no_grad():
            return routed_attention(query, key, value, chosen, case.shared, call)

    def dense() -> object:
        with torch.no_grad():
            return scaled_dot_product_attention(query, key, value, is_causal=True)

    return ours, dense


def training_pair(case: Case) -> Pair:
    """Attention and its gradients."""
    query, key, value = inputs = [x.requires_grad_() for x in _inputs(case)]
    chosen, call = _routes(case), _call()
    given = torch.randn(1, case.length, HEADS, SIZE)

    def ours() -> object:
        return torch.autograd.grad(
            routed_attention(query, key, value, chosen, case.shared, call), (query, key, value), given
        )

    def dense() -> object:
        output = scaled_dot_product_attention(query, key, value, is_causal=True)
        return torch.autograd.grad(output.transpose(1, 2), inputs, given)

    return ours, dense


def model_pair(case: Case) -> Pair:
    """A prompt through a model, up to the logits of its last token."""
    mixers = {"mixture": {"active_heads": case.active, "shared_heads": case.shared}}
    config = AutoConfig.for_model("crosshead_llama", **SHAPE, mixers=mixers, attn_implementation="sdpa")
    stock = AutoConfig.for_model("llama", **SHAPE, attn_implementation="sdpa")
    models = [CrossheadLlamaForCausalLM(config).eval(), AutoModelForCausalLM.from_config(stock).eval()]
    ids = torch.randint(0, SHAPE["vocab_size"], (1, case.length))

    def prefill(model: Any) -> object:
        with torch.no_grad():
            return model(ids, logits_to_keep=1)

    return lambda: prefill(models[0]), lambda: prefill(models[1])


MAKERS: dict[str, Callable[[Case], Pair]] = {
    "forward": attention_pair,
    "forward and backward": training_pair,
    "prefill": model_pair,
}


def _inputs(case: Case) -> list[torch.Tensor]:
    return [torch.randn(1, HEADS, case.length, SIZE) for _ in range(3)]


def _routes(case: Case) -> torch.Tensor:
    """Which heads count for each token: (1, T, H)."""
    drawn = torch.rand(1, case.length, HEADS)
    drawn[..., : case.shared] = 2.0
    return torch.zeros_like(drawn).scatter(-1, drawn.topk(case.active, dim=-1).indices, 1.0) > 0


def _call() -> AttentionCall:
    def unused(*_: torch.Tensor) -> Any:
        raise NotImplementedError("the routed attention does without the backend")

    return AttentionCall(unused, False, None, SIZE**-0.5, 0.0, plain=True)
