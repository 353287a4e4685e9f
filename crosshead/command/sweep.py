"""`crosshead sweep`: compares learning rates in short runs."""

import json
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from crosshead_command.screen import progress
from crosshead_command.train import STOPPED


def sweep(
    recipe: Annotated[
        str, typer.Argument(help="YAML file with a section `sweep`, or the shipped recipe papers/mea_1b_sweep.")
    ],
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change a value of the recipe: section.key=value. Repeatable.")
    ] = None,
    toy: Annotated[Path | None, typer.Option(help="Run a toy-sized copy in this new or empty folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Compare learning rates in short runs.

    Fits a power law to each loss curve, chooses the largest stable rate, and writes sweep.json and sweep.svg. The same
    command resumes a stopped sweep. For example:

    crosshead sweep papers/mea_1b_sweep --set 'sweep.learning_rates=[1e-4, 1e-3]'
    """
    from crosshead.recipes.schema.recipe import load_recipe
    from crosshead.recipes.schema.toy import toy_in_own_folder as at_toy_size
    from crosshead.recipes.sweep.sweep import PICTURE, sweep_runs
    from crosshead.recipes.sweep.sweep import sweep as run
    from crosshead.recipes.trainer.process_group import closing_process_group, is_main_process, main_process_first

    with closing_process_group(), progress() as show:
        loaded = load_recipe(recipe, changes or [])
        sweep_runs(loaded)  # a recipe without rates is refused before the toy is written
        if toy is not None:
            loaded = main_process_first(partial(at_toy_size, loaded, toy))
        report = run(loaded, show)
        is_main = is_main_process()
    if is_main:
        _print(report, Path(loaded.output) / PICTURE, as_json)
    if report["stopped_by"] is not None:
        sys.exit(STOPPED + report["stopped_by"])
    if report["chosen"] is None:
        raise ValueError("no learning rate is stable: try smaller ones")


def _print(report: Mapping[str, Any], picture: Path, as_json: bool) -> None:
    if report["stopped_by"] is not None:
        typer.echo(f"crosshead: stopped after {len(report['runs'])} rates: the same command resumes", err=True)
    elif as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        typer.echo("\n".join([*_lines(report), f"wrote {picture}"]))


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    """A table with one line for each learning rate."""
    yield f"{'rate':>8}  {report['loss'] + ' loss, fitted':>21}  measured  {'floor':>7}  {'exponent':>8}  spikes"
    for run in report["runs"]:
        law = run["law"]
        figures = f"{'':>50}"
        if law:
            losses = f"{run['fitted_loss']:>21.4f}  {run['last_loss']:>8.4f}"
            figures = f"{losses}  {law['floor']:>7.4f}  {law['exponent']:>8.3f}"
        notes = {report["lower"]: "stable, fitted lower than the chosen one", report["chosen"]: "chosen"}
        note = notes.get(run["learning_rate"], run["error"].partition(":")[0])
        yield f"{run['learning_rate']:>8g}  {figures}  {run['spikes']:>6}  {note}".rstrip()
