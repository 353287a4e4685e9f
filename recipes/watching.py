"""What is told of a run beside its loss: how the heads are used, how far the mechanisms have come, and spikes."""

import copy
import json
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import torch
from torch import nn

from crosshead.modeling.mixer import MixerLeaf

from .errors import DivergedError, RecipeError
from .trainable import MIXERS

METRICS = "metrics.jsonl"
WRAPPERS = ("module.", "_orig_mod.", "base_model.model.", "_checkpoint_wrapped_module.", "modules_to_save.default.")
"""What data parallelism, compilation, peft and checkpointing put into names."""
COPY = ".original_module."
"""In the names of what peft keeps beside the modules that move."""
RECENT = 50
"""Steps that a loss is compared with."""
SPIKE, LEAST_SPIKE = 4.0, 0.1
"""A spike lies so many standard deviations, and so many nats, above the mean of recent steps."""
RUNAWAY, LEAST_RUNAWAY, PATIENCE = 2.0, 1.0, 20
"""A run is lost when the loss has been so many times its lowest mean, and so many nats above it, for so many steps."""


class LossWatch:
    """Counts spikes, and ends a run that is lost."""

    def __init__(self, other_after: int = 0) -> None:
        """After that step the loss is another one."""
        self.spikes = self.sound = 0
        """How many; and the last step at which the loss was neither too high nor no number."""
        self._other_after = other_after
        self._forget()

    @property
    def above(self) -> bool:
        """The loss is so high that the run is lost if it stays there."""
        return self._above > 0

    def _forget(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._lowest = float("inf")
        self._above = 0

    def see(self, losses: Sequence[float], first_step: int) -> None:
        """The losses of steps that follow each other."""
        for step, loss in enumerate(losses, first_step):
            if step == self._other_after + 1:
                self._forget()
            check_finite("loss", loss, step)
            if len(self._recent) >= RECENT // 2:
                self._compare(loss, step)
            self._recent.append(loss)
            if not self._above:
                self.sound = step

    def _compare(self, loss: float, step: int) -> None:
        usual = mean(self._recent)
        self._lowest = min(self._lowest, usual)
        self.spikes += loss - usual > max(SPIKE * pstdev(self._recent), LEAST_SPIKE)
        lost = loss > max(RUNAWAY * self._lowest, self._lowest + LEAST_RUNAWAY)
        self._above = self._above + 1 if lost else 0
        if self._above >= PATIENCE:
            raise DivergedError(
                f"the loss has run away: {loss:.2f} at step {step}, and {self._lowest:.2f} before: start again with a "
                "lower train.learning_rate"
            )


def check_finite(name: str, value: float, step: int) -> None:
    """`DivergedError` where there is nothing left to train."""
    if not isfinite(value):
        raise DivergedError(f"the {name} is {value} at step {step}: start again with a lower train.learning_rate")


class MetricsFile:
    """`metrics.jsonl`: a line per log, complete as soon as it is written."""

    def __init__(self, output: Path, step: int) -> None:
        """Goes on behind `step`; what a run that was killed later has written goes."""
        self._path = output / METRICS
        kept = [line for line in self.lines(output) if line["step"] <= step]
        temporary = self._path.with_suffix(".partial")
        with self._telling():
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            temporary.replace(self._path)

    def write(self, line: dict[str, Any]) -> None:
        """Add one."""
        with self._telling(), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RecipeError(
                f"{self._path} cannot be written: {error.strerror}; checkpoints are as they were, and the same "
                "command goes on from them"
            ) from None

    @staticmethod
    def lines(output: Path) -> list[dict[str, Any]]:
        """What is there; a last line that was cut short is left out."""
        path, found = output / METRICS, []
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                found.append(json.loads(line))
            except ValueError:
                break
        return found

    @classmethod
    def last(cls, output: Path) -> dict[str, Any]:
        """The last value of each metric."""
        found: dict[str, Any] = {}
        for line in cls.lines(output):
            found |= line
        return {name: value for name, value in found.items() if name != "losses"}

    @classmethod
    def losses(cls, output: Path, steps: int) -> list[float]:
        """Of the first so many steps."""
        return [loss for line in cls.lines(output) for loss in line.get("losses", ())][:steps]


def starting_points(model: nn.Module) -> dict[str, torch.Tensor]:
    """By name, the parameters of mechanisms that start from values that are not random, at these values.

    Without those that ZeRO-3 has taken apart as it made them: nothing of them is here to be looked at.
    """
    found: dict[str, torch.Tensor] = {}
    for name, leaf in model.named_modules():
        if isinstance(leaf, MixerLeaf) and COPY not in name and not any(map(_is_taken_apart, leaf.parameters())):
            first, second = (_started(leaf, seed) for seed in (0, 1))
            same = [part for part in first if torch.equal(first[part], second[part])]
            found |= {plain_name(f"{name}.{part}"): first[part] for part in same}
    return found


def _is_taken_apart(parameter: torch.Tensor) -> bool:
    """DeepSpeed's ZeRO-3 leaves a parameter without elements, and what it was in an attribute."""
    return hasattr(parameter, "ds_shape")


def _started(leaf: MixerLeaf, seed: int) -> dict[str, torch.Tensor]:
    again = copy.deepcopy(leaf).cpu()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        again.initialise(1.0)
    return {name: parameter.detach() for name, parameter in again.named_parameters(recurse=False)}


@torch.no_grad()
def moved(model: nn.Module, starts: dict[str, torch.Tensor]) -> dict[str, float]:
    """How far each mechanism is from where it would start: 1 is as far as a map is from zero; mean over tensors."""
    distances: dict[str, list[float]] = {}
    for name, parameter in model.named_parameters():
        start = starts.get(plain_name(name))
        if start is not None and not _is_taken_apart(parameter):
            now = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            distance = (now.float().cpu() - start.float()).norm() / start.shape[0] ** 0.5
            mechanism = plain_name(name).split(MIXERS)[1].split(".")[0]
            distances.setdefault(f"moved/{mechanism}", []).append(distance.item())
    return {name: mean(found) for name, found in distances.items()}


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers add to it."""
    for added in WRAPPERS:
        name = name.replace(added, "")
    return name
