"""Host overhead: the time of one decoded token in a model so small that calls take the time, not arithmetic."""

from collections.abc import Mapping
from typing import Any

import torch

from .case import Case
from .models import STOCK, next_token
from .pairs import Run

LAYERS, CACHED = 8, 16
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "tokens": CACHED,
}
MIXERS: dict[str, tuple[dict[str, Any], float | None]] = {
    "knocking-linear": ({"knocking": {"form": "linear"}}, 1.2),
    "knocking-mlp": ({"knocking": {"form": "mlp"}}, None),
    "explicit": ({"explicit": {}}, 1.4),
    "mixture": ({"mixture": {"active_heads": 2, "router": "two_stage"}}, 1.4),
    "talking": ({"talking": {}}, None),
    "differential": ({"differential": {}}, 1.5),
    "gating": ({"gating": {}}, None),
}
"""By the name of their case, with the target."""


def host(ours: bool, **shape: Any) -> Run:
    """A decoded token, on one thread whatever the others take."""
    token = next_token(ours, **shape)

    def run() -> object:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return token()
        finally:
            torch.set_num_threads(threads)

    return run


def _case(name: str, mixers: Mapping[str, Any], target: float | None) -> Case:
    what = f"{name.replace('-', ' ')}, a token after {CACHED} others, a model of {LAYERS} layers of 64, one thread"
    targets = {} if target is None else {"cpu": target}
    return Case(f"host-{name}", what, STOCK, host, SHAPE | {"mixers": mixers}, targets)


CASES = tuple(_case(name, *given) for name, given in MIXERS.items())
