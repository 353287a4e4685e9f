"""Exponential moving average (EMA) of the trained weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import TrainerCallback

FILE = "average.safetensors"
"""File of a checkpoint with the average of each trained parameter, by name."""


class WeightAverage(TrainerCallback):
    """EMA of a model's trained parameters, starting at their initial values and updated after each optimizer step."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        """`decay` is the weight of the previous average in each update."""
        self._parameters = {name: part for name, part in model.named_parameters() if part.requires_grad}
        self._average = {name: part.detach().clone() for name, part in self._parameters.items()}
        self._update = get_ema_multi_avg_fn(decay)

    @torch.no_grad()
    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Update the average with the new weights."""
        trained: Any = [part.detach() for part in self._parameters.values()]
        self._update([*self._average.values()], trained, 0)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averaged weights inside the block, by swapping tensors without a copy."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.data, self._average[name] = self._average[name], parameter.data

    def save(self, checkpoint: Path) -> None:
        """Save the average into a checkpoint folder."""
        save_file({name: part.contiguous() for name, part in self._average.items()}, checkpoint / FILE)

    def load(self, checkpoint: Path) -> None:
        """Load the average of a checkpoint; raise `ValueError` if its tensor names differ from the model's."""
        stored = load_file(checkpoint / FILE)
        for name in sorted(stored.keys() ^ self._average.keys()):
            raise ValueError(f"its {FILE} does not fit the model, as {name} shows")
        for name, part in self._average.items():
            part.copy_(stored[name])
