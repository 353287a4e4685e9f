"""Whole models with a mechanism beside stock ones of the same shape: training steps, prompts and single tokens."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from crosshead.modeling.backbones.llama import CrossheadLlamaForCausalLM

from .attention import SEED
from .case import WHOLE_MEMORY, Case
from .pairs import Run

SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 1024,
}
MIXERS: dict[str, dict[str, Any]] = {
    "knocking": {"knocking": {"form": "mlp"}},
    "explicit": {"explicit": {}},
    "mixture": {"mixture": {"active_heads": 8, "shared_heads": 4}},
    "talking": {"talking": {}},
    "differential": {"differential": {}},
    "gating": {"gating": {}},
}
"""Of the models that are trained, by the name of their case."""
PAPERS_LINEAR = {"knocking": {"form": "linear", "on": ["query", "key", "value"]}}
STOCK = "stock Llama of the same shape, sdpa"


def model(ours: bool, mixers: Mapping[str, Any], tokens: int, **shape: Any) -> Any:
    """A model for this many tokens at least: ours, or the stock one of the same shape."""
    torch.manual_seed(SEED)
    shape |= {"max_position_embeddings": 2 * tokens, "attn_implementation": "sdpa"}
    if ours:
        return CrossheadLlamaForCausalLM(AutoConfig.for_model("crosshead_llama", **shape, mixers=mixers))
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape))


def training_step(
    ours: bool, tokens: int, made_ready: Callable[[Any], Any] = lambda trained: trained, **shape: Any
) -> Run:
    """Loss, gradients and the optimiser's step on one text, of a model that may be compiled for it."""
    trained = model(ours, tokens=tokens, **shape).train()
    optimiser = torch.optim.AdamW(trained.parameters(), lr=1e-4)
    ids, call = torch.randint(shape["vocab_size"], (1, tokens)), made_ready(trained)

    def run() -> object:
        call(ids, labels=ids, use_cache=False).loss.backward()
        optimiser.step()
        return optimiser.zero_grad()

    return run


def prompt(ours: bool, tokens: int, **shape: Any) -> Run:
    """A prompt, up to the logits of its last token."""
    evaluated = model(ours, tokens=tokens, **shape).eval()
    ids = torch.randint(shape["vocab_size"], (1, tokens))

    def run() -> object:
        with torch.no_grad():
            return evaluated(ids, logits_to_keep=1)

    return run


def next_token(ours: bool, tokens: int, **shape: Any) -> Run:
    """One more token after many, again and again: the cache, of random numbers, is cut back to its length."""
    evaluated = model(ours, tokens=tokens, **shape).eval()
    cache, token = DynamicCache(config=evaluated.config), torch.ones(1, 1, dtype=torch.long)
    with torch.no_grad():
        past = evaluated(token).past_key_values
    for index, layer in enumerate(past.layers):  # of whatever form the mechanism keeps
        keys, values = (torch.randn(1, x.shape[1], tokens, x.shape[3]) for x in (layer.keys, layer.values))
        cache.update(keys, values, index)

    def run() -> object:
        with torch.no_grad():
            output = evaluated(token, past_key_values=cache)
        cache.crop(-1)
        return output

    return run


def _step(name: str, mixers: Mapping[str, Any], **targets: float) -> Case:
    what = f"training step of a model with {name.replace('-', ' ')}, 2048 tokens"
    return Case(f"{name}-step", what, STOCK, training_step, SHAPE | {"tokens": 2048, "mixers": mixers}, targets)


def _memory(name: str, mixers: Mapping[str, Any], most: float) -> Case:
    shape = SHAPE | {"tokens": 2048, "mixers": mixers}
    what = f"peak memory of that step with {name.replace('-', ' ')}: weights, gradients, moments, activations"
    targets = {"cpu": most, "cuda": most}
    return Case(f"{name}-step-memory", what, STOCK, training_step, shape, targets, WHOLE_MEMORY, "bytes")


_LINEAR = SHAPE | {"tokens": 2048, "mixers": {"knocking": {"form": "linear"}}}
_MIXTURE = SHAPE | {"tokens": 4096, "mixers": MIXERS["mixture"]}


def _run(name: str, what: str, run: Callable[..., Run], shape: Mapping[str, Any], most: float) -> Case:
    return Case(name, what, STOCK, run, shape, {"cpu": most, "cuda": most}, within_noise="linear" in name)


CASES = (
    _run("mixture-prompt", "a prompt of 4096 tokens, mixture with 8 of 16 heads active", prompt, _MIXTURE, 0.85),
    _run("knocking-linear-prompt", "a prompt of 2048 tokens, knocking linear", prompt, _LINEAR, 1.05),
    _run("knocking-linear-token", "a token after 2048 others, knocking linear", next_token, _LINEAR, 1.1),
    _step("knocking", MIXERS["knocking"], cpu=1.05, cuda=1.02),
    _step("knocking-linear", PAPERS_LINEAR),
    *(_step(name, MIXERS[name]) for name in ("explicit", "mixture", "talking", "differential", "gating")),
    *(_memory(name, mixers, 1.3 if name == "talking" else 1.05) for name, mixers in MIXERS.items()),
    _memory("knocking-linear", PAPERS_LINEAR, 1.05),
)
