"""`crosshead demo`: runs the whole workflow on a small model."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from crosshead_command.screen import progress


def demo(
    tiny: Annotated[bool, typer.Option("--tiny", help="Use a tiny random model, which needs no network.")] = False,
    model: Annotated[
        str | None, typer.Option(help="Decoder to use instead of SmolLM2-135M: a folder, a Hub id or a GGUF file.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Output folder. Default: crosshead-demo, or crosshead-demo-tiny with --tiny.")
    ] = None,
) -> None:
    """Run the whole workflow on SmolLM2-135M.

    Converts the model, trains, evaluates and inspects the result, and writes model cards. Finished steps are kept: the
    same command continues an interrupted run, and after a complete run it only prints the table of results.
    Needs `pip install 'crosshead[demo]'`. For example:

    crosshead demo --tiny
    """
    from crosshead.demo.run import open_demo
    from crosshead.demo.steps import Screen

    if tiny and model is not None:
        raise typer.BadParameter("give --tiny or --model, not both")
    prepared = open_demo(model, tiny, out)
    record = prepared.run(Screen(partial(typer.echo, err=True), progress))
    typer.echo("\n".join(_lines(record, prepared.folder)))


def _lines(record: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """The lines to print: table of results, decoded text, and paths of all results."""
    from crosshead.demo.scoring import PROMPT
    from crosshead.demo.steps import RECORD
    from crosshead.demo.table import sample_lines, table_lines

    yield from table_lines(record["models"])
    yield ""
    yield record["note"]
    yield ""
    yield from sample_lines(record["models"], PROMPT)
    yield ""
    for row in record["models"]:
        yield f"{row['name']}: {row['model']}"
    for name in ("heads.html", "scores.json", RECORD):
        yield str(folder / name)
    yield ""
    yield "To publish the trained model on the Hub under that name (--dry-run only lists the files):"
    yield f"crosshead push {quote(record['trained'])} YOU/MODEL --dry-run"
