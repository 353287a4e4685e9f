"""The cases of `crosshead bench attention`, `crosshead bench decode` and `crosshead bench compiled`."""

from collections.abc import Callable
from typing import Any

from .attention import NORMED_KEYS, PADDED, TWO_QUERIES, explicit_decoding, mixture_layer, talking_layer
from .case import MEMORY, RESULT, TIME, TOTAL_MEMORY, Case
from .models import SHAPE, cache_bytes, compiled_step, next_token, next_token_on_one_thread, prompt, training_step
from .pairs import Run

STOCK = "stock Llama of the same shape, sdpa"
MIXERS: dict[str, dict[str, Any]] = {
    "knocking": {"knocking": {"form": "mlp"}},
    "knocking-linear": {"knocking": {"form": "linear", "on": ["query", "key", "value"]}},
    "explicit": {"explicit": {}},
    "mixture": {"mixture": {"active_heads": 8, "shared_heads": 4}},
    "talking": {"talking": {}},
    "differential": {"differential": {}},
    "gating": {"gating": {}},
}
"""Start of a case's name -> mechanisms of the model that is trained."""
HEADS = {
    "grouped": {"query_heads": 32, "key_value_heads": 8, "head_dim": 128},
    "ungrouped": {"query_heads": 16, "key_value_heads": 16, "head_dim": 64},
    "many": {"query_heads": 32, "key_value_heads": 32, "head_dim": 128},
    "few": {"query_heads": 14, "key_value_heads": 2, "head_dim": 64},
}
"""Start of a decoding case's name -> head counts of the layer."""
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "tokens": 16,
}
"""A model so small that function calls take the time, not arithmetic: measures the host overhead."""
TALKING_BASELINES = {
    "eager": "eager talking-heads attention, which materialises its weights",
    "sdpa": "stock sdpa attention, which does not mix heads",
}
KNOCKING_STEP = {"cpu": 1.05, "cuda": 1.02}
CACHE = "explicit, bytes of KV cache of a sequence, 4 component heads for 8"


def _both(target: float | None) -> dict[str, float]:
    """Return the same target for each device."""
    return {} if target is None else {"cpu": target, "cuda": target}


def _mixture(name: str, tokens: int, active: int, shared: int, flag: str = "", **targets: float) -> Case:
    """Return a case of one `mixture` layer; `flag` is gradients, padded, published, or empty."""
    flags = {each: each == flag for each in ("gradients", "padded", "published")}
    text = f"mixture attention{', without crosshead installed' * flags['published']}, {active} of 16 heads active, "
    text += f"{shared} of them always, {tokens} tokens{', padded' * flags['padded']}, forward"
    text += " and backward" * flags["gradients"]
    shape = {"heads": 16, "head_dim": 64, "tokens": tokens, "active": active, "shared": shared, **flags}
    baseline = "torch's fastest dense causal attention on the same queries, keys and values"
    return Case(f"mixture-{name}-{tokens}", text, baseline, mixture_layer, shape, targets)


def _talking(name: str, against: str, target: float | None = None) -> Case:
    """Return a case of one `talking` layer; its name contains gradients, memory or published to select these."""
    flags = {each: each in name for each in ("gradients", "published")}
    memory = "memory" in name
    text = f"talking attention{', without crosshead installed' * flags['published']}, 4096 tokens, forward"
    text += f"{' and backward' * flags['gradients']}, {'peak memory beyond the inputs' if memory else 'time'}"
    shape = {"heads": 16, "head_dim": 64, "tokens": 4096, "against": against, **flags}
    measured, unit = (MEMORY, "bytes") if memory else (TIME, "seconds")
    baseline = TALKING_BASELINES[against]
    return Case(f"talking-{name}", text, baseline, talking_layer, shape, _both(target), measured, unit)


def _decoding(heads: str, tokens: int, batch: int, target: float, kind: str = "") -> Case:
    parts = [heads, _short(tokens), f"batch-{batch}" if batch > 1 else "", kind.partition(" ")[0]]
    text = f"explicit, a token after {tokens}, batch {batch}, {kind}{', ' * bool(kind)}{_head_counts(heads)}"
    shape = {**HEADS[heads], "tokens": tokens, "batch": batch, "kind": kind}
    baseline = "stock sdpa attention on all heads"
    return Case("-".join(filter(None, parts)), text, baseline, explicit_decoding, shape, _both(target))


def _control(batch: int) -> Case:
    """Return a case with stock attention on both sides: shows how far a ratio is from 1 by chance."""
    text = f"stock sdpa attention on both sides, a token after 2048, batch {batch}, 16 heads of 64"
    shape = {**HEADS["ungrouped"], "tokens": 2048, "batch": batch}
    return Case(f"control-batch-{batch}", text, "itself", lambda _, **sizes: explicit_decoding(False, **sizes), shape)


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def _head_counts(heads: str) -> str:
    return "{query_heads} query and {key_value_heads} KV heads of {head_dim}".format_map(HEADS[heads])


def _half_cache(heads: str, tokens: int) -> dict[str, Any]:
    """Return the shape of a model with half as many component heads as KV heads."""
    queries, key_values, head_dim = HEADS[heads].values()
    counts = {"num_attention_heads": queries, "num_key_value_heads": key_values, "head_dim": head_dim}
    mixers = {"explicit": {"key_heads": key_values // 2, "value_heads": key_values // 2, "norm": False}}
    return {**SHAPE, **counts, "mixers": mixers, "tokens": tokens}


def _model(name: str, text: str, make: Callable[..., Run], shape: Any, target: float, noise: bool = False) -> Case:
    return Case(name, text, STOCK, make, shape, _both(target), within_noise=noise)


def _model_token(heads: str, tokens: int, target: float) -> Case:
    name = f"model-{_short(tokens)}" if heads == "grouped" else f"model-{heads}-{_short(tokens)}"
    text = f"explicit, a token after {tokens} others, whole model, {_head_counts(heads)}"
    return Case(name, text, STOCK, next_token, _half_cache(heads, tokens), _both(target))


def _host(name: str, mixers: dict[str, Any], target: float | None = None) -> Case:
    text = f"{name.replace('-', ' ')}, a token after 16 others, a model of 8 layers of 64, one thread"
    targets = {} if target is None else {"cpu": target}
    return Case(f"host-{name}", text, STOCK, next_token_on_one_thread, {**TINY, "mixers": mixers}, targets)


def _training(name: str) -> tuple[Case, Case, Case]:
    """Return the cases of a training step: its time, its peak memory, and its time in a compiled model."""
    words, shape = name.replace("-", " "), {**SHAPE, "tokens": 2048, "mixers": MIXERS[name]}
    step = f"training step of a model with {words}, 2048 tokens"
    memory = f"peak memory of that step with {words}: weights, gradients, moments, activations"
    targets = _both(1.3 if name == "talking" else 1.05)
    return (
        Case(f"{name}-step", step, STOCK, training_step, shape, KNOCKING_STEP if name == "knocking" else {}),
        Case(f"{name}-step-memory", memory, STOCK, training_step, shape, targets, TOTAL_MEMORY, "bytes"),
        Case(f"{name}-step", f"compiled {step}", f"{STOCK}, compiled as well", compiled_step, shape),
    )


MIXTURE = (
    _mixture("half", 1024, 8, 4),
    _mixture("half", 2048, 8, 4, cpu=0.75),
    _mixture("half", 4096, 8, 4, cpu=0.65, cuda=0.60),
    _mixture("half", 8192, 8, 4, cuda=0.60),
    _mixture("half-unshared", 2048, 8, 0, cpu=0.75),
    _mixture("half-unshared", 4096, 8, 0, cpu=0.65, cuda=0.60),
    _mixture("half-padded", 2048, 8, 4, "padded"),
    _mixture("three-quarters", 1024, 12, 6),
    _mixture("three-quarters", 2048, 12, 6, cpu=0.95, cuda=0.80),
    _mixture("three-quarters", 4096, 12, 6, cpu=0.95, cuda=0.80),
    _mixture("gradients", 2048, 8, 4, "gradients", cpu=0.80, cuda=0.65),
    _mixture("gradients", 4096, 8, 4, "gradients", cpu=0.80, cuda=0.65),
    _mixture("three-quarters-gradients", 2048, 12, 6, "gradients"),
    _mixture("most", 2048, 14, 7),
    _mixture("published", 4096, 8, 4, "published", cpu=1.3, cuda=1.3),
)
TALKING = (
    _talking("forward", "eager", 0.35),
    _talking("gradients", "eager", 0.5),
    _talking("forward-memory", "eager", 1 / 32),
    _talking("gradients-memory", "eager", 1 / 32),
    _talking("forward-beside-sdpa", "sdpa", 2.2),
    _talking("published-beside-sdpa", "sdpa", 2.2),
    _talking("gradients-beside-sdpa", "sdpa"),
    _talking("forward-memory-beside-sdpa", "sdpa"),
    _talking("gradients-memory-beside-sdpa", "sdpa"),
)
LINEAR = {**SHAPE, "tokens": 2048, "mixers": {"knocking": {"form": "linear"}}}
ROUTED = {**SHAPE, "tokens": 4096, "mixers": MIXERS["mixture"]}
MODELS = (
    _model("mixture-prompt", "a prompt of 4096 tokens, mixture with 8 of 16 heads active", prompt, ROUTED, 0.85),
    _model("knocking-linear-prompt", "a prompt of 2048 tokens, knocking linear", prompt, LINEAR, 1.05, True),
    _model("knocking-linear-token", "a token after 2048 others, knocking linear", next_token, LINEAR, 1.1, True),
)
STEPS, STEP_MEMORY, COMPILED = zip(*map(_training, MIXERS), strict=True)
ATTENTION: tuple[Case, ...] = (*MIXTURE, *TALKING, *MODELS, *STEPS, *STEP_MEMORY)
DECODE: tuple[Case, ...] = (
    *(_decoding("grouped", tokens, batch, 0.5) for tokens in (8192, 32768) for batch in (1, 8)),
    *(_decoding("grouped", tokens, batch, 1.0) for tokens in (128, 512, 2048) for batch in (1, 8)),
    *(_decoding("ungrouped", tokens, batch, 1.0) for tokens in (128, 512, 2048, 8192, 32768) for batch in (1, 8)),
    *(_decoding("many", tokens, 1, 1.0) for tokens in (2048, 8192, 32768)),
    *(_decoding("few", tokens, 1, 1.0) for tokens in (2048, 8192)),
    *(_decoding("grouped", tokens, 1, 1.0, PADDED) for tokens in (8192, 32768)),
    *(_decoding("grouped", tokens, 1, 0.5, NORMED_KEYS) for tokens in (8192, 32768)),
    *(_decoding("grouped", tokens, 1, 1.0, TWO_QUERIES) for tokens in (8192, 32768)),
    *map(_control, (1, 8)),
    _model_token("grouped", 16384, 0.9),
    *(_model_token(heads, tokens, 1.0) for heads in ("grouped", "ungrouped") for tokens in (128, 512)),
    Case("cache", CACHE, STOCK, cache_bytes, _half_cache("grouped", 16), _both(0.5), RESULT, "bytes"),
    _host("knocking-linear", {"knocking": {"form": "linear"}}, 1.2),
    _host("knocking-mlp", MIXERS["knocking"]),
    _host("explicit", MIXERS["explicit"], 1.4),
    _host("mixture", {"mixture": {"active_heads": 2, "router": "two_stage"}}, 1.4),
    _host("talking", MIXERS["talking"]),
    _host("differential", MIXERS["differential"], 1.5),
    _host("gating", MIXERS["gating"]),
)
