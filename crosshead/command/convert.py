"""`crosshead convert`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from crosshead_command.screen import progress, show_report

Mixer = Annotated[
    list[str] | None,
    typer.Option(
        help="A mechanism: NAME[:key=value,...]; repeatable; join lists by +, as in on=query+key. For parts of a T5: "
        "NAME@encoder+decoder+cross."
    ),
]
Dtype = Annotated[
    str | None, typer.Option(help="Dtype of the weights: float32, float16 or bfloat16; by default the source's.")
]
Calibration = Annotated[
    Path | None,
    typer.Option(
        help="Text to calibrate on: a text file, a .jsonl file with `text` or `messages`, or a dataset "
        "(datasets:NAME[:SUBSET[:SPLIT]]); for vision models a folder of images; or a saved calibration. By default "
        "a text of crosshead's own and text sampled from the model."
    ),
]
Save = Annotated[Path | None, typer.Option(help="Save the calibration to this .safetensors file, for other runs.")]
Layers = Annotated[
    str | None, typer.Option(help="auto: choose the component heads of `explicit` in each layer by measured loss.")
]
Budget = Annotated[
    str | None, typer.Option(help="For --layers auto: the part of the source's KV cache to keep, such as 50%.")
]
Cache = Annotated[
    str | None,
    typer.Option(help="Compress the KV cache to this part of the source's, such as 50%, by measured loss."),
]
Active = Annotated[
    str | None,
    typer.Option(help="Activate this part of all heads per token by `mixture`, such as 75%, by measured loss."),
]
Device = Annotated[
    Literal["cpu", "cuda"] | None, typer.Option(help="Where the model runs on text: cpu or cuda; by default cpu.")
]
Inexact = Annotated[
    bool, typer.Option("--allow-inexact", help="Allow mechanisms that change the model's predictions at the start.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan of every tensor; write nothing.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing model; other files in OUT stay.")]
Restart = Annotated[bool, typer.Option("--restart", help="Discard the work of an unfinished run for OUT.")]
NoVerify = Annotated[bool, typer.Option("--no-verify", help="Do not compare the result with the source.")]
Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


def convert(
    source: Annotated[str, typer.Argument(help="A checkpoint folder, a Hub id, or a GGUF file.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    mixer: Mixer = None,
    recipe: Annotated[Path | None, typer.Option(help="A YAML file with `mixers` and these options.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Grow the vocabulary to this size.")] = None,
    dtype: Dtype = None,
    calibration: Calibration = None,
    save_calibration: Save = None,
    cache: Cache = None,
    active: Active = None,
    layers: Layers = None,
    budget: Budget = None,
    seed: Annotated[int | None, typer.Option(help="Seed of random starting values; by default 0.")] = None,
    device: Device = None,
    allow_inexact: Inexact = False,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    restart: Restart = False,
    no_verify: NoVerify = False,
    as_json: Json = False,
) -> None:
    """Convert a stock checkpoint of a supported family to a crosshead model.

    Mechanisms: knocking, explicit, mixture, talking, differential, gating; for T5 also bilinear. For example:

    crosshead convert Qwen/Qwen3-0.6B out --mixer knocking:form=linear,on=query+key+value

    crosshead convert SmolLM2.gguf out --cache 75% --active 75%
    """
    from crosshead.conversion.convert import convert as run
    from crosshead.conversion.options import with_recipe

    given = {
        "revision": revision,
        "vocab_size": vocab_size,
        "dtype": dtype,
        "calibration": calibration,
        "save_calibration": save_calibration,
        "cache": cache,
        "active": active,
        "layers": layers,
        "budget": budget,
        "seed": seed,
        "device": device,
        "allow_inexact": allow_inexact,
    }
    mixers, options = with_recipe(recipe, mixer or [], given)
    how = {"overwrite": overwrite, "restart": restart, "verify": not no_verify, "plan_only": dry_run}
    with progress() as show:
        report = run(source, out, mixers, **how, **options, progress=show)
    show_report(report, as_json)
