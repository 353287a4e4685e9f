"""`crosshead verify`."""

from pathlib import Path
from typing import Annotated

import typer

from crosshead_command.screen import progress, show_report


def verify(
    source: Annotated[str, typer.Argument(help="What the model was made from: a folder, a Hub id, or a GGUF file.")],
    model: Annotated[str, typer.Argument(help="The model: a folder or a Hub id.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of SOURCE on the Hub.")] = None,
    text: Annotated[Path | None, typer.Option(help="Text to compare on; Python's help texts if not given.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code of MODEL's folder that is not this crosshead's own.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Compare a model with its source. Checks tensors, logits, loss, greedy text, cache and loading.

    Fails where the two ought to be equal and are not.
    """
    from crosshead.conversion.verification.verify import verify as run

    with progress() as show:
        report = run(source, model, revision=revision, text=text, trust_remote_code=trust_remote_code, progress=show)
    show_report(report, as_json)
