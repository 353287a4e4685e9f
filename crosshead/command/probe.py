"""`crosshead probe`: measures and plots the loss with heads masked or layers compressed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from crosshead_command.screen import progress
from crosshead_command.strict import StrictCommand

app = typer.Typer(
    help="Measure the loss with heads masked or layers compressed.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Out = Annotated[Path, typer.Option(help="JSON file for the results. The plot is written to the same name with .svg.")]
TextFile = Annotated[
    Path | None, typer.Option(help="Text file to measure on. Default: a text shipped with crosshead.")
]
Windows = Annotated[int, typer.Option(min=1, help="Number of windows taken from the text.")]
Length = Annotated[
    int | None,
    typer.Option(min=2, help="Tokens per window. Default: 512, or the context of the model if that is shorter."),
]
Source = Annotated[str, typer.Argument(help="Stock model: a directory, a Hub id or a GGUF file.")]
Calibration = Annotated[Path | None, typer.Option(help="Calibration data or saved calibration, as for `convert`.")]
Method = Annotated[str, typer.Option(help="Compression method: aligned or svd.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")]


@app.command(no_args_is_help=True, cls=StrictCommand)
def heads(
    models: Annotated[list[str], typer.Argument(help="Model directories or Hub ids, stock or crosshead.")],
    text: TextFile = None,
    draws: Annotated[int, typer.Option(min=1, help="Random draws for each number of masked heads.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws.")] = 0,
    windows: Windows = 4,
    length: Length = None,
    out: Out = Path("heads.json"),
    overwrite: Overwrite = False,
) -> None:
    """Measure the loss with heads of each layer masked at random.

    The number of masked heads per layer increases from 0 to all but one. For example:

    crosshead probe heads SOURCE MODEL --text prose.txt --out heads.json
    """
    from crosshead.evals.probe.masked_heads import lines

    _check_out(out, overwrite)
    subjects = [_opened(name, length) for name in models]
    length = length or min(512, *(model.config.max_position_embeddings for model in subjects))
    with progress() as show:
        reports = {model.name: _masked(model, text, (windows, length), draws, seed, show) for model in subjects}
    report = {"draws": draws, "seed": seed, "windows": windows, "length": length, "models": reports}
    _write(out, report, lines(reports), ("masked heads of each layer", "loss"))


@app.command(no_args_is_help=True, cls=StrictCommand)
def layers(
    source: Source,
    text: TextFile = None,
    calibration: Calibration = None,
    method: Method = "aligned",
    revision: Revision = None,
    windows: Windows = 1,
    length: Length = None,
    out: Out = Path("layers.json"),
    overwrite: Overwrite = False,
) -> None:
    """Measure the loss with one layer compressed, for each layer.

    Reports the increase of the loss if the key or value heads of only this layer are compressed. For example:

    crosshead probe layers Qwen/Qwen3-0.6B --text prose.txt --out layers.json
    """
    from crosshead.conversion.compress.layer_probe import lines, probe_layers

    _check_out(out, overwrite)
    options = {"revision": revision, "method": method, "calibration": calibration, "text": text}
    with progress() as show:
        report = probe_layers(source, **options, length=length, count=windows, progress=show)
    _write(out, report, lines(report), ("layer", "rise of the loss"))


@app.command(no_args_is_help=True, cls=StrictCommand)
def budget(
    source: Source,
    active: Annotated[
        bool,
        typer.Option(
            "--active/--cache", help="Budgets for the active heads of `mixture`, or for the KV cache of `explicit`."
        ),
    ] = False,
    text: TextFile = None,
    calibration: Calibration = None,
    method: Method = "aligned",
    revision: Revision = None,
    windows: Windows = 4,
    length: Length = None,
    out: Out = Path("budget.json"),
    overwrite: Overwrite = False,
) -> None:
    """Estimate the KL divergence for each size of the KV cache.

    The divergence from the source is measured with one layer compressed at a time. The estimate is the sum over
    layers, which `crosshead convert --cache` minimises to choose component heads. With --active, it is given for each
    number of active heads, as in `convert --active`. For example:

    crosshead probe budget Qwen/Qwen3-0.6B --text prose.txt --out budget.json
    """
    from crosshead.conversion.compress.layer_probe import budget_lines, probe_budget

    _check_out(out, overwrite)
    options = {"revision": revision, "method": method, "calibration": calibration, "text": text}
    with progress() as show:
        report = probe_budget(source, active=active, **options, length=length, count=windows, progress=show)
    part = "active heads, as a part of all" if active else "part of the source's KV cache"
    _write(out, report, budget_lines(report), (part, "expected KL divergence, nats per token"))


def _opened(name: str, length: int | None) -> Any:
    """Open a model and check that heads can be masked on windows of this length."""
    from crosshead.evals.open_model import check_backbone, open_model

    opened = open_model(name)
    check_backbone(opened)
    context = opened.config.max_position_embeddings
    if length is not None and length > context:
        raise ValueError(f"--length {length} exceeds the context of {name}: use at most {context}")
    return opened


def _masked(opened: Any, text: Path | None, size: tuple[int, int], draws: int, seed: int, show: Any) -> Any:
    """The losses of one model; `size` is the number of windows and the tokens per window."""
    from crosshead.common.errors import EvalError
    from crosshead.common.plain_text import read_text
    from crosshead.conversion.calibration.text import default_text, windows
    from crosshead.evals.open_model import load_model
    from crosshead.evals.probe.masked_heads import counts_to_mask, head_counts, masked_heads

    prose = default_text() if text is None else read_text(text, EvalError)
    tokens = windows(opened.tokenizer, prose, size[1], size[0], opened.config.vocab_size)
    model, stage = load_model(opened), f"masking {opened.label}"
    counts = counts_to_mask(min(head_counts(model)))
    return masked_heads(model, tokens, counts, draws, seed, lambda *done: show(stage, *done))


def _check_out(out: Path, overwrite: bool) -> None:
    """Raise an error before the measurement if the output files cannot be written or matplotlib is missing."""
    import matplotlib  # noqa: F401  # `_write` needs it

    from crosshead.common.atomic_write import check_targets

    if out.suffix != ".json":
        raise ValueError(f"--out {out} does not end in .json: the plot is written to the same name with .svg")
    check_targets([out, out.with_suffix(".svg")], overwrite)


def _write(out: Path, report: Mapping[str, Any], lines: Mapping[str, Any], axes: tuple[str, str]) -> None:
    from crosshead.common.atomic_write import write_atomically
    from crosshead.evals.probe.plot import line_plot

    picture = out.with_suffix(".svg")
    write_atomically({out: json.dumps(report, indent=2) + "\n", picture: line_plot(lines, *axes)})
    for name, points in lines.items():
        typer.echo(f"{name}: " + ", ".join(f"{x:g}: {y:.4f}" for x, y in points))
    typer.echo(f"wrote {out} and {picture}")
