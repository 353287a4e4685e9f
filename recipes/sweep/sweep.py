"""Learning-rate sweep: make a run with each rate, fit a power law to each loss curve, choose the largest stable rate.

Multi-head Explicit Attention (section 5.1.2, appendices D and E) chooses, for each model, the largest rate without a
permanent jump of the loss, and reports that it also has the lowest final loss. Rules that the paper does not give:

- A run is stable if all its losses are finite, it did not diverge, and its training loss did not rise towards the end
  by more than noise. A run also counts as diverged if its loss was too high for a tenth of its steps in a row (at
  least 3, at most 20), even if it fell again. Shorter spikes are counted, but do not make a run unstable.
- The largest stable rate is chosen. If the fitted loss of a smaller rate is lower by more than `ERRORS` standard
  errors of the difference, the report names that rate as `lower`.
- Curves begin after the warmup.
"""

import gc
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy

from crosshead.common.atomic_write import write_atomically
from crosshead.common.errors import DivergedError, RecipeError
from crosshead.common.progress import Progress, silent
from crosshead.evals.probe.plot import svg_plot

from ..schema.recipe import Recipe
from ..train import train
from ..trainer.process_group import is_main_process
from . import loss_curve as curves

REPORT, PICTURE, DIVERGED = "sweep.json", "sweep.svg", "diverged.json"
ERRORS = 2
"""Number of standard errors by which fitted losses must differ to count as different."""
DOTS, SEGMENTS = 200, 60
"""Maximum number of dots, and number of line points, per curve in the plot."""


@dataclass(frozen=True)
class Attempt:
    """Result of the run with one learning rate."""

    learning_rate: float
    output: str
    """Output folder of the run."""
    error: str
    """Reason why the run is not stable; empty if it is stable."""
    spikes: int
    curve: curves.LossCurve
    law: curves.ScalingLaw | None
    """None if the run diverged."""

    @property
    def stable(self) -> bool:
        """Whether the run is stable, so that its learning rate may be chosen."""
        return not self.error

    @property
    def fitted_loss(self) -> float:
        """Fitted loss at the last point of the curve; infinite if the run diverged."""
        return self.law.loss(self.curve.tokens[-1]) if self.law else math.inf


def sweep(recipe: Recipe, progress: Progress = silent) -> dict[str, Any]:
    """Train the unfinished runs, write `sweep.json` and `sweep.svg` into the recipe's output, return the report."""
    import matplotlib  # noqa: F401  # fail before the training if the package is missing

    if not recipe.counts_tokens:
        raise RecipeError(f"sweep fits curves over tokens, and the objective {recipe.objective.name} counts samples")
    runs, kind = sweep_runs(recipe), curves.loss_kind(recipe)
    steps = recipe.steps - curves.curve_start(recipe)
    if steps < curves.MIN_POINTS:
        raise RecipeError(
            f"{max(0, steps)} of {recipe.steps} steps come after the warmup, too few for a curve: train on more tokens"
        )
    attempts: list[Attempt] = []
    for run in runs:
        diverged, stopped_by = _finish(run, progress)
        if stopped_by is not None:
            return _report(recipe, kind, attempts) | {"stopped_by": stopped_by}
        attempts.append(judge(run, kind, diverged))
        report = _report(recipe, kind, attempts)
        if is_main_process():
            output = Path(recipe.output)
            write_atomically({output / REPORT: json.dumps(report, indent=2), output / PICTURE: plot(report)})
    return report


def sweep_runs(recipe: Recipe) -> list[Recipe]:
    """Return one recipe per learning rate, the smallest rate first."""
    if recipe.sweep is None:
        raise RecipeError("the recipe has no section `sweep`: give it, as in sweep: {learning_rates: [1e-4, 3e-4]}")
    fixed = recipe.train.mechanisms.learning_rate
    if fixed is not None and recipe.train.trainable == "mixers":
        raise RecipeError(
            f"train.mechanisms.learning_rate={fixed:g} would be the rate of every run, as train.trainable='mixers': "
            "leave it out"
        )
    common = replace(recipe, hub=None, sweep=None)
    return [
        replace(
            common,
            output=str(Path(recipe.output) / f"rate_{rate:g}"),
            train=replace(recipe.train, learning_rate=rate),
        )
        for rate in sorted(recipe.sweep.learning_rates)
    ]


def _finish(run: Recipe, progress: Progress) -> tuple[str | None, int | None]:
    """Train a run to its end; return the error message if it diverged, and the signal if it was stopped."""
    content = json.loads(json.dumps(asdict(run)))
    marker = Path(run.output) / DIVERGED
    before = _read_marker(marker)
    if before.get("recipe") == content:
        return before["error"], None

    def show(stage: str, done: int, total: int | None, message: str = "") -> None:
        progress(f"{run.train.learning_rate:g} {stage}", done, total, message)

    try:
        outcome = train(run, show)
    except DivergedError as error:
        if is_main_process():
            write_atomically({marker: json.dumps({"recipe": content, "error": str(error)}, indent=2)})
        return str(error), None
    finally:
        gc.collect()  # a trainer and its model are a reference cycle
    return None, (outcome.stopped_by or 0) if outcome.model is None else None


def _read_marker(path: Path) -> dict[str, Any]:
    """Return the record of a diverged run; empty if it is missing or damaged, so that the run is repeated."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) and isinstance(content.get("error"), str) else {}


def judge(run: Recipe, kind: str, diverged: str | None) -> Attempt:
    """Evaluate a finished run: stability, spikes and fitted power law; `diverged` is the error of a diverged run."""
    curve, rise = curves.loss_curve(run, kind), curves.final_rise(run)
    reason = diverged or curves.divergence(run) or (f"the loss rose {rise:.2f} above its minimum" if rise else "")
    if diverged is None and len(curve.losses) < curves.MIN_POINTS:
        raise RecipeError(
            f"{run.output} has {len(curve.losses)} losses after the warmup, too few for a curve: train on more tokens"
        )
    law = curves.fit_scaling_law(curve.tokens, curve.losses) if diverged is None else None
    return Attempt(run.train.learning_rate, run.output, reason, curves.count_spikes(run), curve, law)


def choose(attempts: Sequence[Attempt]) -> tuple[Attempt | None, Attempt | None]:
    """Return the run with the largest stable rate, and the run with the lowest loss if it is significantly lower."""
    stable = [attempt for attempt in attempts if attempt.stable]
    if not stable:
        return None, None
    chosen = max(stable, key=lambda attempt: attempt.learning_rate)
    best = min(stable, key=lambda attempt: attempt.fitted_loss)
    error = math.hypot(*(attempt.law.error for attempt in (chosen, best) if attempt.law))
    return chosen, best if chosen.fitted_loss - best.fitted_loss > ERRORS * error else None


def _report(recipe: Recipe, kind: str, attempts: list[Attempt]) -> dict[str, Any]:
    chosen, lower = choose(attempts)
    return {
        "loss": kind,
        "tokens": recipe.steps * recipe.per_step,
        "chosen": chosen.learning_rate if chosen else None,
        "lower": lower.learning_rate if lower else None,
        "runs": [
            asdict(attempt)
            | {
                "stable": attempt.stable,
                "fitted_loss": attempt.fitted_loss if attempt.law else None,
                "last_loss": attempt.curve.last_loss if attempt.law else None,
            }
            for attempt in attempts
        ],
        "stopped_by": None,
    }


def plot(report: Mapping[str, Any]) -> str:
    """Plot the report as SVG: losses as dots, fitted power laws as lines; diverged runs may leave the axis range."""
    runs = report["runs"]
    finished = [loss for run in runs if run["law"] for _, loss in _dots(run)]
    with svg_plot("tokens", f"{report['loss']} loss") as (axes, picture):
        axes.set_xscale("log")
        for index, run in enumerate(runs):
            colour, dots = f"C{index}", _dots(run)
            chosen = run["learning_rate"] == report["chosen"]
            axes.plot([tokens for tokens, _ in dots], [loss for _, loss in dots], ".", color=colour, alpha=0.6)
            axes.plot(*_law(run), color=colour, label=_label(run, chosen), gid=f"{run['learning_rate']:g}")
        if finished:
            axes.set_ylim(0.98 * min(finished), 1.02 * max(finished))
    return picture.getvalue()


def _law(run: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return tokens and losses of points on the fitted power law; empty if the run diverged."""
    if not run["law"]:
        return [], []
    tokens = numpy.geomspace(run["curve"]["tokens"][0], run["curve"]["tokens"][-1], SEGMENTS)
    return tokens, [curves.ScalingLaw(**run["law"]).loss(count) for count in tokens]


def _label(run: Mapping[str, Any], chosen: bool) -> str:
    status = run["error"].partition(":")[0] or ("chosen" if chosen else "stable")
    fitted = f"fitted {run['fitted_loss']:.4f}, " if run["law"] else ""
    return f"{run['learning_rate']:g}\n{fitted}{run['spikes']} spikes\n{status}"


def _dots(run: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Reduce a curve to at most `DOTS` points, by means over neighbours."""
    tokens, losses = run["curve"]["tokens"], run["curve"]["losses"]
    size = math.ceil(len(losses) / DOTS) or 1
    return [
        (mean(tokens[start : start + size]), mean(losses[start : start + size]))
        for start in range(0, len(losses), size)
    ]
