"""`crosshead inspect`."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from crosshead_command.screen import progress

MAXIMUM_NAME = 40
"""Characters of a text on the command line that are its name."""
LOOKS_LIKE_A_FILE = re.compile(r"\S*[/\\]\S*|\S+\.\w{1,5}")


def inspect(
    model: Annotated[str, typer.Argument(help="Model directory or Hub id, stock or crosshead.")],
    text: Annotated[list[str], typer.Option(help="Text file, or the text itself, of at most 512 tokens. Repeatable.")],
    out: Annotated[Path, typer.Option(help="HTML file to write; the data is written to the same name with .json.")],
    other: Annotated[
        str | None, typer.Argument(metavar="[MODEL2]", help="A second model, shown side by side.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
) -> None:
    """Write an HTML page with the attention heads of a model on a text.

    It shows attention maps, learnt matrices of the mechanisms, routing, norms and similarity of heads. For example:

    crosshead inspect Qwen/Qwen3-0.6B --text "The cat sat on the mat." --out report.html
    """
    from transformers.utils.logging import disable_progress_bar

    from crosshead.evals.inspect.page import check_target, write_report
    from crosshead.evals.inspect.report import inspect_report

    disable_progress_bar()
    check_target(out, overwrite)
    texts = _texts(text)
    with progress() as show:
        report = inspect_report([model] if other is None else [model, other], texts, show)
    written = write_report(report, out)
    typer.echo(f"wrote {' and '.join(map(str, written))}")


def _texts(given: Sequence[str]) -> dict[str, str]:
    """The texts by name."""
    from crosshead.conversion.calibration.text import read_text

    texts: dict[str, str] = {}
    for each in given:
        is_file = os.path.isfile(each)
        if not is_file and LOOKS_LIKE_A_FILE.fullmatch(each):
            raise ValueError(f"the text file {each} does not exist: give a file, or a text of several words")
        name = Path(each).name if is_file else " ".join(each.split())
        name = name if is_file or len(name) <= MAXIMUM_NAME else f"{name[: MAXIMUM_NAME - 1]}…"
        if name in texts:
            raise ValueError(f"two texts have the name {name}: rename one of them")
        texts[name] = read_text(Path(each)) if is_file else each
    return texts
