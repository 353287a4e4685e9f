"""`crosshead eval`: scores models on benchmarks or on the user's own data."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from crosshead_command.screen import InterruptedByUserError

QUICK, HF = "quick", "hf"
HARNESS_DEFAULTS = {"include_path": None, "backend": HF, "confirm_run_unsafe_code": False}
"""Default values of the options that only lm-evaluation-harness uses."""

SuiteOption = Annotated[
    str | None,
    typer.Option(
        help="Set of benchmarks: moh-llm, moh-llama3, mea, mea-reasoning, kha, quick (default), or offline, which "
        "needs no network."
    ),
]
DataOption = Annotated[
    Path | None,
    typer.Option(
        help="Your own data instead of a suite: rows (TSV or JSON lines) for a classifier, text for a masked language "
        "model or T5, or a folder of images."
    ),
]


def evaluate(
    models: Annotated[list[str], typer.Argument(help="Model directories or Hub ids; a Hub id may end in @REVISION.")],
    suite: SuiteOption = None,
    tasks: Annotated[
        str | None, typer.Option(help="Tasks of lm-evaluation-harness, separated by commas, instead of a suite.")
    ] = None,
    include_path: Annotated[Path | None, typer.Option(help="Directory with your own tasks, whose code runs.")] = None,
    data: DataOption = None,
    limit: Annotated[
        int | None, typer.Option(help="Number of items of each task, from the first. Default: all, or 200 with quick.")
    ] = None,
    batch_size: Annotated[str, typer.Option(help="A number, or auto for the largest that fits into memory.")] = "auto",
    backend: Annotated[str, typer.Option(help="hf (transformers), or vllm if installed in this environment.")] = HF,
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare each further model with the first on the same items.")
    ] = False,
    out: Annotated[Path, typer.Option(help="JSON file for the results.")] = Path("eval.json"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run a model's own code; with --backend vllm, also crosshead's."),
    ] = False,
    confirm_run_unsafe_code: Annotated[
        bool, typer.Option("--confirm-run-unsafe-code", help="Allow tasks that run code which the model writes.")
    ] = False,
) -> None:
    """Score models on benchmarks or on your own data.

    Benchmarks and your own tasks run in lm-evaluation-harness; --data needs no task. For example:

    crosshead eval models/mine --suite offline

    crosshead eval models/classifier --data dev.tsv

    crosshead eval Qwen/Qwen3-0.6B models/mine --suite mea --compare --out mea.json
    """
    from crosshead.common.atomic_write import check_targets
    from crosshead.evals.harness.report import eval_lines

    tools: dict[str, Any] = {
        "include_path": include_path,
        "backend": backend,
        "confirm_run_unsafe_code": confirm_run_unsafe_code,
    }
    _check_source(suite, tasks, data, tools)
    check_targets([out], overwrite)
    options: dict[str, Any] = {"limit": limit, "batch_size": int(batch_size) if batch_size.isdecimal() else batch_size}
    options |= {"compared": compare, "trust_remote_code": trust_remote_code, "progress": _show_progress}
    with _saving(out, len(models)) as options["save"]:
        if data is not None:
            from crosshead.evals.scoring.evaluate import score_data

            report = score_data(models, data, **options)
        else:
            from crosshead.evals.harness.evaluate import evaluate as run

            report = run(models, QUICK if suite is None else suite, tasks=_names(tasks), **tools, **options)
    lines = [*eval_lines(report), f"wrote {out}"]
    typer.echo(json.dumps(report, indent=2) if as_json else "\n".join(lines))


@contextmanager
def _saving(out: Path, models: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that saves a report; an interrupt says how many models the saved report has."""
    from crosshead.common.atomic_write import write_atomically

    saved = 0

    def save(report: dict[str, Any]) -> None:
        nonlocal saved
        write_atomically({out: json.dumps(report, indent=2) + "\n"})
        saved = len(report["models"])

    try:
        yield save
    except KeyboardInterrupt as error:
        message = f"{out} has the scores of {saved} of {models} models" if saved else ""
        raise InterruptedByUserError(message) from error


def _check_source(suite: str | None, tasks: str | None, data: Path | None, tools: dict[str, Any]) -> None:
    """Raise a usage error for options that exclude each other."""
    sources = {"--suite": suite, "--tasks": tasks, "--data": data}
    if sum(value is not None for value in sources.values()) > 1:
        raise typer.BadParameter(f"give only one of {', '.join(sources)}")
    if tools["include_path"] is not None and tasks is None and data is None:
        raise typer.BadParameter("--include-path has no effect without --tasks, which names the tasks in it")
    if data is not None and tools != HARNESS_DEFAULTS:
        raise typer.BadParameter("--include-path, --backend and --confirm-run-unsafe-code do not apply to --data")


def _names(tasks: str | None) -> list[str]:
    names = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    if tasks is not None and not names:
        raise ValueError("--tasks has no task: give one or more, separated by commas")
    return names


def _show_progress(message: str) -> None:
    if sys.stderr.isatty():
        typer.echo(message, err=True)
