"""Which learning rate to train with: short runs over a few, a power law through each, the largest that is stable.

Multi-head Explicit Attention (section 5.1.2, appendices D and E) takes, for each model, the largest rate at which the
loss never jumps for good, and says that it also ends lowest. What it leaves open is settled here:

- A run is stable if it got to its end, without a loss that is no number or runs away, and if its training loss ended
  no higher than it had been before, but for noise. Spikes that passed are counted and forgiven.
- The largest stable rate is chosen. Where a smaller one has a lower fitted loss after the sweep's last token, by more
  than twice the standard error of the two, the report names it, under `lower`, and leaves the choice as it is.
- Curves begin behind the warmup.
"""

import gc
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from crosshead.common.errors import DivergedError, RecipeError

from ..schema.recipe import Recipe
from ..train import train
from ..trainer.progress import Progress, silent
from .loss_curves import LossCurve, begin, kind_of_loss, loss_curve, rise, spikes
from .plot import plot
from .scaling_law import LEAST_POINTS, ScalingLaw, fit_scaling_law

REPORT, PICTURE, DIVERGED = "sweep.json", "sweep.svg", "diverged.json"
ERRORS = 2
"""How many standard errors make a difference."""


@dataclass(frozen=True)
class Try:
    """What became of one learning rate."""

    learning_rate: float
    output: str
    stable: bool
    told: str
    """Why it is not stable."""
    spikes: int
    curve: LossCurve
    law: ScalingLaw | None
    """None where the run diverged."""

    def fitted_loss(self) -> float:
        """After the last token."""
        return self.law.loss(self.curve.tokens[-1]) if self.law else math.inf

    def error(self) -> float:
        """Of that loss."""
        return self.law.error if self.law else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For scripts and for the picture."""
        return asdict(self) | {"fitted_loss": self.fitted_loss() if self.law else None}


def sweep(recipe: Recipe, progress: Progress = silent) -> dict[str, Any]:
    """Train what is not done yet, and write `sweep.json` and `sweep.svg` into the recipe's output."""
    runs, kind = sweep_runs(recipe), kind_of_loss(recipe)
    _check_length(recipe)
    tries: list[Try] = []
    for run in runs:
        diverged, stopped_by = _finished(run, progress)
        if stopped_by is not None:
            return _report(recipe, kind, tries) | {"stopped_by": stopped_by}
        tries.append(judge(run, kind, diverged))
        report = _report(recipe, kind, tries)
        _write(Path(recipe.output), report)
    return report


def _check_length(recipe: Recipe) -> None:
    """Before the first of the runs is made for nothing."""
    behind = recipe.steps - begin(recipe)
    if behind < LEAST_POINTS:
        raise RecipeError(
            f"{max(0, behind)} of {recipe.steps} steps lie behind the warmup, too few for a curve: train on more "
            "tokens"
        )


def sweep_runs(recipe: Recipe) -> list[Recipe]:
    """A recipe for each learning rate, the smallest first."""
    if recipe.sweep is None:
        raise RecipeError("the recipe has no section `sweep`: give it, as in sweep: {learning_rates: [1e-4, 3e-4]}")
    fixed = recipe.train.mechanisms.learning_rate
    if fixed is not None and recipe.train.trainable == "mixers":
        raise RecipeError(
            f"train.mechanisms.learning_rate={fixed:g} would be the rate of every run, as train.trainable='mixers': "
            "leave it out"
        )
    return [
        replace(
            recipe,
            output=str(Path(recipe.output) / f"rate_{rate:g}"),
            train=replace(recipe.train, learning_rate=rate),
            hub=None,
            sweep=None,
        )
        for rate in sorted(recipe.sweep.learning_rates)
    ]


def _finished(run: Recipe, progress: Progress) -> tuple[str | None, int | None]:
    """Bring a run to its end: what is told if it diverged; and the signal, if one stopped it."""
    asked = json.loads(json.dumps(asdict(run)))
    marker = Path(run.output) / DIVERGED
    before = json.loads(marker.read_bytes()) if marker.exists() else {}
    if before.get("recipe") == asked:
        return before["told"], None

    def show(stage: str, done: int, total: int | None, told: str = "") -> None:
        progress(f"{run.train.learning_rate:g} {stage}", done, total, told)

    try:
        outcome = train(run, show)
    except DivergedError as error:
        if _is_first_process():
            marker.write_text(json.dumps({"recipe": asked, "told": str(error)}, indent=2), encoding="utf-8")
        return str(error), None
    finally:
        gc.collect()  # a trainer and its model refer to each other
    return None, (outcome.stopped_by or 0) if outcome.model is None else None


def judge(run: Recipe, kind: str, diverged: str | None) -> Try:
    """Whether a run that has ended is stable, and its fitted loss."""
    curve, told, risen = loss_curve(run, kind), diverged or "", rise(run)
    if not told and risen:
        told = f"the loss ended {risen:.2f} above its lowest"
    if diverged is None and len(curve.losses) < LEAST_POINTS:
        raise RecipeError(
            f"{run.output} has {len(curve.losses)} losses behind the warmup, too few for a curve: train on more tokens"
        )
    return Try(
        learning_rate=run.train.learning_rate,
        output=run.output,
        stable=not told,
        told=told,
        spikes=spikes(run),
        curve=curve,
        law=fit_scaling_law(curve.tokens, curve.losses) if diverged is None else None,
    )


def choose(tries: Sequence[Try]) -> Try | None:
    """The largest stable rate."""
    return max((each for each in tries if each.stable), key=lambda each: each.learning_rate, default=None)


def lower(tries: Sequence[Try]) -> Try | None:
    """The stable rate with the lowest fitted loss, where it is below that of the one chosen, errors allowed for."""
    chosen = choose(tries)
    if chosen is None:
        return None
    best = min((each for each in tries if each.stable), key=Try.fitted_loss)
    apart = chosen.fitted_loss() - best.fitted_loss()
    return best if apart > ERRORS * math.hypot(chosen.error(), best.error()) else None


def _report(recipe: Recipe, kind: str, tries: list[Try]) -> dict[str, Any]:
    chosen, better = choose(tries), lower(tries)
    return {
        "loss": kind,
        "tokens": recipe.steps * recipe.train.batch_tokens,
        "chosen": chosen.learning_rate if chosen else None,
        "lower": better.learning_rate if better else None,
        "runs": [each.as_dict() for each in tries],
        "stopped_by": None,
    }


def _write(output: Path, report: dict[str, Any]) -> None:
    if _is_first_process():
        (output / REPORT).write_text(json.dumps(report, indent=2), encoding="utf-8")
        (output / PICTURE).write_text(plot(report), encoding="utf-8")


def _is_first_process() -> bool:
    from accelerate import PartialState

    return bool(PartialState().is_main_process)
