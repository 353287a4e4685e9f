"""`crosshead inspect`."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from crosshead_command.screen import progress

LONGEST_NAME = 40
"""Characters of a text that was not a file, to call it by."""
LOOKS_LIKE_A_FILE = re.compile(r"\S*[/\\]\S*|\S+\.\w{1,5}")


def inspect(
    model: Annotated[str, typer.Argument(help="A folder or a Hub id, stock or crosshead.")],
    text: Annotated[list[str], typer.Option(help="A file, or the text itself: up to 512 tokens. Repeatable.")],
    out: Annotated[Path, typer.Option(help="The page to write; its data goes beside it, as .json.")],
    other: Annotated[
        str | None, typer.Argument(metavar="[MODEL2]", help="A second model, to see both side by side.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing page.")] = False,
) -> None:
    """Write an HTML page of what the heads of a model do on a text.

    All heads of a layer, one head token by token, what the mechanisms have learnt, which heads are on, norms,
    similarity of heads. For example:

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
    """The texts by what to call them."""
    from crosshead.conversion.calibration.text import read_text

    texts: dict[str, str] = {}
    for each in given:
        is_file = os.path.isfile(each)
        if not is_file and LOOKS_LIKE_A_FILE.fullmatch(each):
            raise ValueError(f"the text {each} is no file: give one, or a text of more than one word")
        name = Path(each).name if is_file else " ".join(each.split())
        name = name if is_file or len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
        if name in texts:
            raise ValueError(f"two texts are called {name}: give one of them another name")
        texts[name] = read_text(Path(each)) if is_file else each
    return texts
