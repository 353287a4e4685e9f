"""`crosshead fold`: converts a crosshead model back to a stock checkpoint."""

from pathlib import Path
from typing import Annotated

import typer

from crosshead_command.convert import DryRun, Json, NoVerify, Overwrite, Restart
from crosshead_command.screen import progress, show_report


def fold(
    model: Annotated[
        str, typer.Argument(help="Crosshead model, for a GGUF file also a stock model: a folder or a Hub id.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write the checkpoint to, or a file that ends in .gguf.")],
    keep_cache: Annotated[
        bool,
        typer.Option(
            help="Keep the smaller KV cache of `explicit`: its component heads become fewer, wider KV heads."
        ),
    ] = False,
    type: Annotated[
        str | None,
        typer.Option(
            help="Type of a GGUF file: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1 or q4_0. Default: the model's dtype."
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    restart: Restart = False,
    no_verify: NoVerify = False,
    as_json: Json = False,
) -> None:
    """Convert a crosshead model back to a stock checkpoint.

    Multiplies linear `knocking` and `explicit` without norm into the projections, and removes `mixture` with all heads
    active and binary gates. `talking`, `gating` and other forms of `knocking` fold only with their neutral initial
    values; `differential` and `bilinear` do not fold. With --keep-cache, the stock checkpoint has the smaller KV cache
    of `explicit`, also in vLLM and llama.cpp. For example:

    crosshead fold models/converted model.gguf --type q8_0
    """
    from crosshead.conversion.fold import fold as run

    how = {"overwrite": overwrite, "restart": restart, "verify": not no_verify, "plan_only": dry_run}
    with progress() as show:
        report = run(model, out, keep_cache=keep_cache, type=type, revision=revision, **how, progress=show)
    show_report(report, as_json)
