"""`crosshead verify`."""

from pathlib import Path
from typing import Annotated

import typer

from crosshead_command.convert import Json
from crosshead_command.screen import progress, show_report


def verify(
    source: Annotated[str, typer.Argument(help="The source of the model: a folder, a Hub id, or a GGUF file.")],
    model: Annotated[str, typer.Argument(help="The model: a folder or a Hub id.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of SOURCE on the Hub.")] = None,
    text: Annotated[
        Path | None, typer.Option(help="A text file to compare on; by default Python's help texts.")
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run code in the folder of MODEL that crosshead did not write."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare a model with its source. Checks tensors, logits, loss, greedy text, cache and loading.

    Fails if the two should be equal and are not.
    """
    from crosshead.conversion.verification.verify import verify as run

    with progress() as show:
        report = run(source, model, revision=revision, text=text, trust_remote_code=trust_remote_code, progress=show)
    show_report(report, as_json)
