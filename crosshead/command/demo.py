"""`crosshead demo`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from crosshead_command.screen import progress


def demo(
    tiny: Annotated[bool, typer.Option("--tiny", help="A random tiny model: seconds, and no network.")] = False,
    model: Annotated[
        str | None, typer.Option(help="A model of your own: a folder, a Hub id or a GGUF file; else SmolLM2-135M.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder to fill; crosshead-demo if not given.")] = None,
) -> None:
    """Run the whole workflow on SmolLM2-135M. Converts, trains, evaluates, inspects and writes cards.

    What was made is kept: the same command goes on where it stopped, and a second run only shows the table. It wants
    `pip install 'crosshead[demo]'`. For example:

    crosshead demo --tiny
    """
    from transformers.utils.logging import disable_progress_bar

    from crosshead.demo.begin import open_demo
    from crosshead.demo.steps import Screen

    if tiny and model is not None:
        raise typer.BadParameter("give --tiny or --model, not both")
    disable_progress_bar()
    asked = open_demo(model, tiny, out)
    for line in _lines(asked.run(Screen(_tell, progress)), asked.folder):
        typer.echo(line)


def _tell(line: str) -> None:
    typer.echo(line, err=True)


def _lines(record: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """The table, the decoded text, and where everything is."""
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
    yield "What would be published of the last one; without --dry-run it is, under that name on the Hub:"
    yield f"crosshead push {quote(record['models'][-1]['model'])} YOU/MODEL --dry-run"
