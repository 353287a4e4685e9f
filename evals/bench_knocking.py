"""`knocking` beside a stock model of the same shape: a training step, a prompt, one more token, and memory.

Memory is the process's own high-water mark, as the system counts it: of a step, above what was held before it.
"""

import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from crosshead.modeling.modeling_crosshead import CrossheadLlamaForCausalLM

Pair = tuple[Callable[[], object], Callable[[], object]]
"""Ours and the rival."""
TOKENS = 2048
SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 1024,
    "max_position_embeddings": 2 * TOKENS,
    "attn_implementation": "sdpa",
}


def models(form: str) -> tuple[Any, Any]:
    """Ours, and the stock one of the same shape."""
    mixers = {"knocking": {"form": form}}
    ours = CrossheadLlamaForCausalLM(AutoConfig.for_model("crosshead_llama", **SHAPE, mixers=mixers))
    return ours, AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SHAPE))


def training_pair(form: str) -> Pair:
    """A training step: loss, gradients and the optimiser."""
    ours, stock = models(form)
    return trainer(ours), trainer(stock)


def prefill_pair(form: str) -> Pair:
    """A prompt, up to the logits of its last token, in evaluation mode."""
    ours, stock = (model.eval() for model in models(form))
    return prefiller(ours), prefiller(stock)


def decode_pair(form: str) -> Pair:
    """One more token after a prompt, in evaluation mode."""
    ours, stock = (model.eval() for model in models(form))
    return decoder(ours), decoder(stock)


def trainer(model: Any) -> Callable[[], object]:
    """Steps on one text."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, SHAPE["vocab_size"], (1, TOKENS))

    def step() -> object:
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        return loss

    return step


def prefiller(model: Any) -> Callable[[], object]:
    """Prompts, all the same."""
    ids = torch.randint(0, SHAPE["vocab_size"], (1, TOKENS))

    def prefill() -> object:
        with torch.no_grad():
            return model(ids, logits_to_keep=1)

    return prefill


def decoder(model: Any) -> Callable[[], object]:
    """The token after the prompt, again and again: the cache is cut back to its length."""
    cache = DynamicCache(config=model.config)
    token = torch.ones(1, 1, dtype=torch.long)
    with torch.no_grad():
        model(torch.randint(0, SHAPE["vocab_size"], (1, TOKENS)), past_key_values=cache, logits_to_keep=1)

    def decode() -> object:
        with torch.no_grad():
            output = model(token, past_key_values=cache)
        cache.crop(-1)
        return output

    return decode


def step_memory(model: Any) -> int:
    """Bytes that a training step takes at its peak beyond what stays; once in a process, which remembers its peak."""
    step = trainer(model)
    step()
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5", encoding="utf-8")
    before = _now()
    step()
    return _peak() - before


def _now() -> int:
    """Bytes held now."""
    return _status("VmRSS") or _peak()


def _peak() -> int:
    """Bytes held at the peak so far."""
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def _status(name: str) -> int:
    facts = Path("/proc/self/status")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":")), 0)
