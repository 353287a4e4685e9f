"""`crosshead bench`: speeds beside a named rival, measured in turn in one run."""

import json
from pathlib import Path
from typing import Annotated

import typer

from crosshead_command.screen import progress

app = typer.Typer(
    help="Measure speed: each figure beside that of a named rival, in turn, in one run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def options() -> None:
    """What holds for every measurement."""


@app.command()
def train(
    cases: Annotated[
        list[str] | None,
        typer.Argument(
            help="knocking-mlp, knocking-linear, explicit, mixture, talking or differential; all if none is named."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each side.")] = 5,
    steps: Annotated[int, typer.Option(min=2, help="Training steps of a run; the first is not timed.")] = 11,
    out: Annotated[Path | None, typer.Option(help="Also write all figures, machine and versions as JSON.")] = None,
) -> None:
    """Training: our trainer and model beside transformers' Trainer and the stock model, same shape, same settings.

    From scratch, with 17 million parameters and 512 tokens to a sequence. Times mean something only where nothing
    else runs. For example:

    crosshead bench train knocking-mlp explicit --out train.json
    """
    from transformers.utils.logging import disable_progress_bar

    from crosshead.evals.whole_files import check_targets, write_whole
    from crosshead.recipes.bench_train import bench_train, bench_train_lines

    if out is not None:
        check_targets([out], overwrite=True)
    disable_progress_bar()
    with progress() as show:
        report = bench_train(cases or [], rounds, steps, show)
    if out is not None:
        write_whole({out: json.dumps(report, indent=2) + "\n"})
    for line in bench_train_lines(report):
        print(line)
