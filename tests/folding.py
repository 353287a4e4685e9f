"""Models with linear knocks, folded and not."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from crosshead.modeling import mixed_attention

LINEAR = {"knocking": {"form": "linear", "on": ["query", "key", "value"]}}
TOKENS = torch.arange(1, 15).view(2, 7)


@contextmanager
def plainly() -> Iterator[None]:
    """With nothing folded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixed_attention, "folds", lambda *_: False)
        yield


def unfolded(model: Any) -> torch.Tensor:
    """Logits of the plain path."""
    with plainly():
        return folded(model)


def folded(model: Any) -> torch.Tensor:
    """Logits in evaluation."""
    with torch.no_grad():
        return model(TOKENS).logits


def holds(model: Any) -> list[list[str]]:
    """Which sides each layer has folded."""
    layers = [getattr(layer.self_attn, "_folded", {}) for layer in model.model.layers]
    return [[side for side, kept in layer.items() if kept.product is not None] for layer in layers]
