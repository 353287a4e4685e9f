"""`crosshead convert`: converts a stock checkpoint to a crosshead model."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from crosshead_command.screen import progress, show_report

Mixer = Annotated[
    list[str] | None,
    typer.Option(
        help="Mechanism to add: NAME[:key=value,...]; join lists by +, as in on=query+key. For parts of a T5: "
        "NAME@encoder+decoder+cross. Repeatable."
    ),
]
Dtype = Annotated[
    str | None, typer.Option(help="Dtype of the weights: float32, float16 or bfloat16. Default: the source's.")
]
Calibration = Annotated[
    Path | None,
    typer.Option(
        help="Data to calibrate on: a text file, a .jsonl file with `text` or `messages`, or a dataset "
        "(datasets:NAME[:SUBSET[:SPLIT]]); for vision models a folder of images; or a calibration saved with "
        "--save-calibration. Default: a text shipped with crosshead, and text sampled from the model."
    ),
]
Save = Annotated[
    Path | None, typer.Option(help="Save the calibration to this .safetensors file, to reuse it with --calibration.")
]
Layers = Annotated[
    str | None,
    typer.Option(
        help="auto: choose the number of component heads of `explicit` per layer by measured loss. Needs --budget."
    ),
]
Budget = Annotated[
    str | None, typer.Option(help="For --layers auto: fraction of the source's KV cache to keep, such as 50%.")
]
Cache = Annotated[
    str | None,
    typer.Option(
        help="Compress the KV cache to this fraction of the source's, such as 50%, by measured loss; short for "
        "--mixer explicit --layers auto --budget 50%."
    ),
]
Active = Annotated[
    str | None,
    typer.Option(
        help="Keep this fraction of all heads active per token with `mixture`, such as 75%; the number of heads per "
        "layer is chosen by measured loss."
    ),
]
Device = Annotated[Literal["cpu", "cuda"] | None, typer.Option(help="Device on which the model runs. Default: cpu.")]
Inexact = Annotated[
    bool, typer.Option("--allow-inexact", help="Allow options whose initial outputs differ much from the source's.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the plan: size, KV cache and changed tensors; write nothing.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing model in OUT; its other files stay.")
]
Restart = Annotated[
    bool, typer.Option("--restart", help="Start again instead of continuing an unfinished run for OUT.")
]
NoVerify = Annotated[bool, typer.Option("--no-verify", help="Skip the comparison of the result with the source.")]
Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


def convert(
    source: Annotated[str, typer.Argument(help="Stock checkpoint: a folder, a Hub id or a GGUF file.")],
    out: Annotated[Path, typer.Argument(help="Folder to write the model to.")],
    mixer: Mixer = None,
    recipe: Annotated[
        Path | None, typer.Option(help="YAML file with `mixers` and other options of this command.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Increase the vocabulary to this size.")] = None,
    dtype: Dtype = None,
    calibration: Calibration = None,
    save_calibration: Save = None,
    cache: Cache = None,
    active: Active = None,
    layers: Layers = None,
    budget: Budget = None,
    seed: Annotated[int | None, typer.Option(help="Seed of random initial values. Default: 0.")] = None,
    device: Device = None,
    allow_inexact: Inexact = False,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    restart: Restart = False,
    no_verify: NoVerify = False,
    as_json: Json = False,
) -> None:
    """Convert a stock checkpoint to a crosshead model.

    Adds mechanisms: knocking, explicit, mixture, talking, differential, gating; for T5 also bilinear. For example:

    crosshead convert Qwen/Qwen3-0.6B out --mixer knocking:form=linear,on=query+key+value

    crosshead convert SmolLM2.gguf out --cache 75% --active 75%
    """
    from crosshead.conversion.convert import convert as run
    from crosshead.conversion.options import with_recipe

    arguments = {
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
    mixers, options = with_recipe(recipe, mixer or [], arguments)
    how = {"overwrite": overwrite, "restart": restart, "verify": not no_verify, "plan_only": dry_run}
    with progress() as show:
        report = run(source, out, mixers, **how, **options, progress=show)
    show_report(report, as_json)
