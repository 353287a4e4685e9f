"""`crosshead convert`."""

from pathlib import Path
from typing import Annotated

import typer

from crosshead_command.screen import progress, show_report

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing model; other files in OUT stay.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan of every tensor; write nothing.")]
Restart = Annotated[
    bool, typer.Option("--restart", help="Discard what an unfinished run left for OUT, and begin again.")
]


def convert(
    source: Annotated[str, typer.Argument(help="A folder, a Hub id, or a GGUF file.")],
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    mixer: Annotated[
        list[str] | None,
        typer.Option(help="NAME[:key=value,...], repeatable, in the order they apply; lists are joined by +."),
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="A YAML file with the same options and `mixers`.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Grow the vocabulary to this size.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16; the source's if not given.")] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="Text to calibrate on, or a saved calibration; Python's own help texts if not given."),
    ] = None,
    save_calibration: Annotated[Path | None, typer.Option(help="Keep what was observed, for other runs.")] = None,
    layers: Annotated[str | None, typer.Option(help="auto: choose `explicit`'s component heads by loss.")] = None,
    budget: Annotated[float | None, typer.Option(help="For --layers auto: KV cache, as part of the source's.")] = None,
    seed: Annotated[int | None, typer.Option(help="For what starts at random; 0 if not given.")] = None,
    allow_inexact: Annotated[bool, typer.Option("--allow-inexact", help="Accept a start far from neutral.")] = False,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    restart: Restart = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Do not compare the result with the source.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Convert a stock Llama or Qwen checkpoint to a crosshead model.

    Mechanisms: knocking, explicit, mixture, talking, differential, gating. For example:

    crosshead convert Qwen/Qwen3-0.6B out --mixer knocking:form=linear,on=query+key+value

    crosshead convert SmolLM2.gguf out --mixer explicit:key_heads=2,value_heads=2
    """
    from crosshead.conversion.convert import convert as run
    from crosshead.conversion.options import with_recipe

    given = {
        "revision": revision,
        "vocab_size": vocab_size,
        "dtype": dtype,
        "calibration": calibration,
        "save_calibration": save_calibration,
        "layers": layers,
        "budget": budget,
        "seed": seed,
        "allow_inexact": allow_inexact,
    }
    mixers, options = with_recipe(recipe, mixer or [], given)
    how = {"overwrite": overwrite, "restart": restart, "verify": not no_verify, "plan_only": dry_run}
    with progress() as show:
        report = run(source, out, mixers, **how, **options, progress=show)
    show_report(report, as_json)
