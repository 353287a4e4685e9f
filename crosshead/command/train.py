"""`crosshead train`: trains a model from a recipe."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from crosshead_command.screen import progress

STOPPED = 128
"""Exit status of a stopped run minus the signal number, as in a shell; the same command resumes the run."""


def train(
    recipe: Annotated[str, typer.Argument(help="YAML file, or a shipped recipe such as small/smollm2_knocking.")],
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change a value of the recipe: section.key=value. Repeatable.")
    ] = None,
    toy: Annotated[Path | None, typer.Option(help="Run a toy-sized copy in this new or empty folder.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print parameters, FLOPs and memory of the run, and stop.")
    ] = False,
    accelerate: Annotated[
        str | None,
        typer.Option(help="For --dry-run: configuration file of accelerate, or a shipped one such as fsdp2_8_gpus."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For --dry-run: print the report as JSON.")] = False,
    save_teacher: Annotated[
        Path | None,
        typer.Option(
            help="Save the teacher's highest logits in this folder, to be read by distillation.logits, and stop."
        ),
    ] = None,
) -> None:
    """Train a model from a recipe.

    The same command resumes a stopped run. For example:

    crosshead train small/smollm2_knocking --set model.path=models/mine --set train.learning_rate=1e-5
    """
    from crosshead.recipes.schema.recipe import load_recipe
    from crosshead.recipes.schema.toy import toy_in_own_folder as at_toy_size
    from crosshead.recipes.train import train as run
    from crosshead.recipes.trainer.process_group import closing_process_group, is_main_process, main_process_first
    from crosshead.recipes.trainer.teacher_logits import save_teacher as write_teacher

    if not dry_run and (accelerate is not None or as_json):
        raise typer.BadParameter("--accelerate and --json are for --dry-run: `accelerate launch` starts a real run")
    if dry_run and save_teacher is not None:
        raise typer.BadParameter("--dry-run saves nothing: leave out --save-teacher")
    with closing_process_group(), progress() as show:
        loaded = load_recipe(recipe, changes or [])
        if toy is not None:
            loaded = main_process_first(partial(at_toy_size, loaded, toy))
        if dry_run:
            _show_dry_run(loaded, accelerate, as_json)
            return
        if save_teacher is not None:
            write_teacher(loaded, save_teacher, show)
            typer.echo(f"wrote {save_teacher}")
            return
        outcome = run(loaded, show)
        is_main = is_main_process()
    if is_main:
        _report(outcome)
    if outcome.model is None:
        sys.exit(STOPPED + (outcome.stopped_by or 0))  # without main(), which would print another line for Ctrl-C
    if loaded.hub is not None and is_main:
        _push(outcome.model, loaded.hub)


def _show_dry_run(recipe: Any, accelerate: str | None, as_json: bool) -> None:
    from crosshead.recipes.estimate.dry_run import dry_run, dry_run_lines
    from crosshead.recipes.estimate.memory import ONE_GPU, read_sharding

    report = dry_run(recipe, read_sharding(accelerate) if accelerate is not None else ONE_GPU)
    print(json.dumps(report, indent=2) if as_json else "\n".join(dry_run_lines(report)))


def _push(model: Path, hub: Any) -> None:
    """Upload the model. Called after the other processes have ended, because an upload may take long."""
    from crosshead_command.card import write_card
    from crosshead_command.push import checked, publish

    try:
        if not (model / "README.md").exists():
            write_card(model)
        publish(model, hub.repo, hub.private, checked(model))
    except ValueError as error:
        raise ValueError(f"{model} is complete, but not pushed: {error}; the same command pushes it") from error


def _report(outcome: Any) -> None:
    if outcome.model is None:
        message = f"stopped at step {outcome.step} of {outcome.steps}: the same command resumes"
        typer.echo(f"crosshead: {message}", err=True)
        return
    names = ("loss", "eval_loss", "eval_accuracy")
    losses = {name: outcome.metrics[name] for name in names if name in outcome.metrics}
    typer.echo(f"trained {outcome.steps} steps: {', '.join(f'{name} {loss:.4f}' for name, loss in losses.items())}")
    typer.echo(f"wrote {outcome.model}")
