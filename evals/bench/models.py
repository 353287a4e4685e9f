"""Benchmark runs of whole models: training steps, prompts and decoding steps, with and without a mechanism."""

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from shutil import which
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from crosshead.common.errors import EvalError
from crosshead.modeling.backbones.llama import CrossheadLlamaForCausalLM
from crosshead.modeling.cache import CACHE

from .case import SEED
from .pairs import Run

SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 1024,
}
COMPILER_BACKEND = "inductor"


def build_model(ours: bool, mixers: Mapping[str, Any], tokens: int, **shape: Any) -> Any:
    """Build a model for at least this many tokens: ours, or the stock model of the same shape."""
    torch.manual_seed(SEED)
    shape |= {"max_position_embeddings": 2 * tokens, "attn_implementation": "sdpa"}
    if ours:
        return CrossheadLlamaForCausalLM(AutoConfig.for_model("crosshead_llama", **shape, mixers=mixers))
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape))


def training_step(
    ours: bool, tokens: int, compile_model: Callable[[Any], Any] = lambda model: model, **shape: Any
) -> Run:
    """Return a run of loss, gradients and optimiser step on one text."""
    model = build_model(ours, tokens=tokens, **shape).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids, forward = torch.randint(shape["vocab_size"], (1, tokens)), compile_model(model)

    def run() -> object:
        forward(ids, labels=ids, use_cache=False).loss.backward()
        optimiser.step()
        return optimiser.zero_grad()

    return run


def compiled_step(ours: bool, tokens: int, **shape: Any) -> Run:
    """Return a run of a training step of a model compiled in one graph; the first run compiles it."""
    torch.compiler.reset()  # otherwise earlier cases count towards the recompile limit
    return training_step(ours, tokens, partial(torch.compile, fullgraph=True, backend=COMPILER_BACKEND), **shape)


def check_compiler() -> None:
    """Raise `EvalError` if the C++ compiler that torch.compile needs is missing."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if which(compiler) is None:
        raise EvalError(f"torch.compile needs {compiler}, which is not installed: install it, or set CXX")


def prompt(ours: bool, tokens: int, **shape: Any) -> Run:
    """Return a run of a forward pass over a prompt, with the logits of its last token."""
    model = build_model(ours, tokens=tokens, **shape).eval()
    return torch.no_grad()(partial(model, torch.randint(shape["vocab_size"], (1, tokens)), logits_to_keep=1))


def next_token(ours: bool, tokens: int, **shape: Any) -> Run:
    """Return a run of one decoding step; its cache has random values and is cropped to its length after each run."""
    model = build_model(ours, tokens=tokens, **shape).eval()
    cache, token = DynamicCache(config=model.config), torch.ones(1, 1, dtype=torch.long)
    with torch.no_grad():
        past = model(token)[CACHE]
    for index, layer in enumerate(past.layers):  # the mechanism decides how many heads a layer caches
        keys, values = (torch.randn(1, x.shape[1], tokens, x.shape[3]) for x in (layer.keys, layer.values))
        cache.update(keys, values, index)

    @torch.no_grad()
    def run() -> object:
        output = model(token, **{CACHE: cache})
        cache.crop(-1)
        return output

    return run


def next_token_on_one_thread(ours: bool, **shape: Any) -> Run:
    """Return a run of one decoding step on one thread: for a tiny model, this measures the host overhead."""
    token = next_token(ours, **shape)

    def run() -> object:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return token()
        finally:
            torch.set_num_threads(threads)

    return run


def cache_bytes(ours: bool, tokens: int, **shape: Any) -> Run:
    """Return a run that returns the size in bytes of the cache of one sequence."""
    model, ids = build_model(ours, tokens=tokens, **shape).eval(), torch.ones(1, tokens, dtype=torch.long)

    @torch.no_grad()
    def count() -> float:
        layers = model(ids)[CACHE].layers
        return float(sum(x.nbytes for layer in layers for x in (layer.keys, layer.values)))

    return count
