"""`crosshead verify`: compares a model with its source."""

from pathlib import Path
from typing import Annotated, Any

import typer

from crosshead_command.convert import Device, Json
from crosshead_command.screen import progress, show_report


def verify(
    source: Annotated[str, typer.Argument(help="Source of the model: a folder, a Hub id or a GGUF file.")],
    model: Annotated[
        str, typer.Argument(help="Converted model: a folder or a Hub id; with --engine llama.cpp also a GGUF file.")
    ],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of SOURCE on the Hub.")] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help="Text file to compare on, for vision models a folder of images. Default: a text shipped with "
            "crosshead, or random pixel values."
        ),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Compare in this serving engine instead: vllm or llama.cpp.")
    ] = None,
    engine_python: Annotated[
        Path | None, typer.Option(help="Python interpreter of the environment with the engine. Default: this one.")
    ] = None,
    device: Device = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run code in the folder of MODEL that crosshead did not write."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare a model with its source.

    Checks tensors, logits, loss, greedy text, KV cache and loading, and fails if the two should be equal and are not.
    With --engine, reports the results of a serving engine for both: text, log-probabilities, size of the KV cache and
    tokens per second.
    """
    from crosshead.conversion.verification.engines import verify_in_engine
    from crosshead.conversion.verification.verify import verify as run

    if engine is None and engine_python is not None:
        raise typer.BadParameter("--engine-python has no effect without --engine")
    if engine is not None and device is not None:
        raise typer.BadParameter("--device has no effect with --engine")
    options: dict[str, Any] = {"revision": revision, "text": text, "trust_remote_code": trust_remote_code}
    with progress() as show:
        if engine is None:
            report = run(source, model, **options, device=device or "cpu", progress=show)
        else:
            report = verify_in_engine(source, model, engine, python=engine_python, **options, progress=show)
    show_report(report, as_json)
