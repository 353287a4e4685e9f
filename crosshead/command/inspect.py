"""`crosshead inspect`: writes an HTML page that shows the attention heads of a model."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from crosshead_command.screen import progress

MAXIMUM_NAME = 40
"""Maximum characters of the name of a text given on the command line."""
Content = TypeVar("Content", str, Path)
LOOKS_LIKE_A_FILE = re.compile(r"\S*[/\\]\S*|\S+\.\w{1,5}")
"""Matches a word with a slash or a file suffix: probably the name of a file that does not exist."""


def inspect(
    model: Annotated[
        str, typer.Argument(help="Stock or crosshead model: a directory or a Hub id, which may end in @REVISION.")
    ],
    out: Annotated[Path, typer.Option(help="HTML file to write. The data is written to the same name with .json.")],
    text: Annotated[
        list[str] | None, typer.Option(help="Text of at most 512 tokens, or a text file. Repeatable.")
    ] = None,
    target: Annotated[
        list[str] | None, typer.Option(help="For T5: text of the decoder, or a text file; one for each --text.")
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(help="Image file, for vision and diffusion transformers instead of --text. Repeatable."),
    ] = None,
    time: Annotated[
        int | None,
        typer.Option(help="For diffusion transformers: time step of the noise added to the image. Default: 250."),
    ] = None,
    other: Annotated[
        str | None, typer.Argument(metavar="[MODEL2]", help="Second model, shown next to the first.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
) -> None:
    """Write an HTML page that shows the attention heads of a model.

    The page shows, for a text or an image, attention maps, learnt matrices of the mechanisms, routing, norms and
    similarity of heads. For example:

    crosshead inspect Qwen/Qwen3-0.6B --text "The cat sat on the mat." --out report.html
    """
    if not text and not image:
        raise typer.BadParameter("give --text, or for a vision or diffusion transformer --image")
    from crosshead.evals.inspect.inputs import Inputs
    from crosshead.evals.inspect.page import check_target, write_report
    from crosshead.evals.inspect.report import inspect_report

    check_target(out, overwrite)
    texts = _named("text", [_read(each) for each in text or []])
    images = _named("image", [(each.name, _existing(each)) for each in image or []])
    inputs = Inputs(texts, [_read(each)[1] for each in target or []], images, time)
    with progress() as show:
        report = inspect_report([model] if other is None else [model, other], inputs, show)
    written = write_report(report, out)
    typer.echo(f"wrote {' and '.join(map(str, written))}")


def _read(argument: str) -> tuple[str, str]:
    """Name and content of a text that is given as itself or as a file."""
    from crosshead.common.errors import EvalError
    from crosshead.common.plain_text import check_characters, read_text

    is_file = os.path.isfile(argument)
    if not is_file and LOOKS_LIKE_A_FILE.fullmatch(argument):
        raise ValueError(f"the text file {argument} does not exist: give a file, or a text of several words")
    name = Path(argument).name if is_file else " ".join(argument.split())
    name = name if is_file or len(name) <= MAXIMUM_NAME else f"{name[: MAXIMUM_NAME - 1]}…"
    return name, read_text(Path(argument), EvalError) if is_file else check_characters(argument, "the text", EvalError)


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise ValueError(f"the image file {file} does not exist")
    return file


def _named(kind: str, inputs: Sequence[tuple[str, Content]]) -> dict[str, Content]:
    """The inputs, name -> content; `ValueError` if two have the same name. `kind` is the noun for error messages."""
    named: dict[str, Content] = {}
    for name, content in inputs:
        if name in named:
            raise ValueError(f"two {kind}s have the name {name}: give one of them in a file with another name")
        named[name] = content
    return named
