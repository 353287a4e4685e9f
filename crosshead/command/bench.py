"""`crosshead bench`: measures speed and memory against a baseline."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from crosshead_command.probe import Overwrite
from crosshead_command.screen import progress
from crosshead_command.strict import StrictCommand

if TYPE_CHECKING:
    from crosshead.conversion.bench_convert import Synthetic
    from crosshead.evals.bench.case import Case

app = typer.Typer(
    help="Measure speed and memory against a baseline.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Names = Annotated[list[str] | None, typer.Argument(help="Cases from the list above. Default: all.")]
Device = Annotated[
    Literal["cpu", "cuda"],
    typer.Option(
        help="cpu (float32) or cuda (bfloat16; cases of one attention layer use Triton kernels if installed)."
    ),
]
Rounds = Annotated[int, typer.Option(min=1, help="Runs of each case and of its baseline; at most 3 for memory.")]
Out = Annotated[Path | None, typer.Option(help="JSON file for all measurements, the machine and versions.")]


@app.command(cls=StrictCommand)
def attention(
    cases: Names = None, device: Device = "cpu", rounds: Rounds = 7, out: Out = None, overwrite: Overwrite = False
) -> None:
    """Measure attention layers and whole models of each mechanism.

    Measures time and peak memory. An attention layer has 16 heads of 64; a model has two layers of width 1024. Memory
    is the resident memory of a child process on a CPU, and the count of torch's allocator on a GPU. Cases:

    \b
    mixture-half-1024, mixture-half-2048, mixture-half-4096, mixture-half-8192, mixture-half-padded-2048
        8 of 16 heads active, 4 of them shared; the number in the name is the number of tokens; baseline: torch's
        dense attention
    mixture-half-unshared-2048, mixture-half-unshared-4096
        8 heads active, none shared
    mixture-three-quarters-1024, mixture-three-quarters-2048, mixture-three-quarters-4096
        12 heads active, 6 shared
    mixture-most-2048
        14 heads active, 7 shared, where dense attention is as fast
    mixture-gradients-2048, mixture-gradients-4096, mixture-three-quarters-gradients-2048
        forward and backward with 8 heads active, 4 shared; for three quarters 12 and 6
    mixture-published-4096
        8 heads active, 4 shared, with the attention code that is saved with a published model
    talking-forward, talking-gradients, talking-forward-memory, talking-gradients-memory
        4096 tokens; baseline: eager attention with the same maps
    talking-forward-beside-sdpa, talking-gradients-beside-sdpa
    talking-forward-memory-beside-sdpa, talking-gradients-memory-beside-sdpa
        as above; baseline: stock sdpa attention
    talking-published-beside-sdpa
        as above, with the attention code that is saved with a published model
    mixture-prompt, knocking-linear-prompt, knocking-linear-token
        a prompt of 4096 (mixture) or 2048 tokens, or one token after 2048; baseline: the stock model
    knocking-step, knocking-linear-step, explicit-step, mixture-step, talking-step, differential-step, gating-step
    knocking-step-memory, knocking-linear-step-memory, explicit-step-memory
    mixture-step-memory, talking-step-memory, differential-step-memory, gating-step-memory
        a training step on 2048 tokens; baseline: the stock model

    A case takes up to half a minute on two cores; eager attention, training steps and memory take one to three
    minutes. All cases take half an hour and 6 GB of memory. Stop other processes before you measure times. For
    example:

    crosshead bench attention mixture-half-4096 talking-forward --out attention.json
    """
    from crosshead.evals.bench.cases import ATTENTION

    _check_out(out, overwrite)
    _measure("attention", ATTENTION, cases, device, rounds, out)


@app.command(cls=StrictCommand)
def decode(
    cases: Names = None, device: Device = "cpu", rounds: Rounds = 15, out: Out = None, overwrite: Overwrite = False
) -> None:
    """Measure the decoding of one token, and the host overhead.

    Decoding is measured with `explicit`, which has half as many component heads as KV heads; the overhead on the host
    (Python and kernel launches) with each mechanism. The number in a name is the number of cached tokens. Cases:

    \b
    grouped-128, grouped-512, grouped-2k, grouped-8k, grouped-32k
    grouped-128-batch-8, grouped-512-batch-8, grouped-2k-batch-8, grouped-8k-batch-8, grouped-32k-batch-8
        32 query heads and 8 KV heads of 128; batch 1 or 8
    grouped-8k-padded, grouped-32k-padded
        with a padding mask
    grouped-8k-normed, grouped-32k-normed
        with normed keys, as in Qwen3
    grouped-8k-two, grouped-32k-two
        two new tokens
    ungrouped-128, ungrouped-512, ungrouped-2k, ungrouped-8k, ungrouped-32k
    ungrouped-128-batch-8, ungrouped-512-batch-8, ungrouped-2k-batch-8, ungrouped-8k-batch-8, ungrouped-32k-batch-8
        16 query heads and 16 KV heads of 64; batch 1 or 8
    many-2k, many-8k, many-32k
        32 query heads and 32 KV heads of 128
    few-2k, few-8k
        14 query heads and 2 KV heads of 64
    control-batch-1, control-batch-8
        stock attention on both sides: shows how far a ratio is from 1 by chance
    model-128, model-512, model-16k
        a model with two layers of width 1024, 32 query heads, 8 KV heads of 128; baseline: the stock model
    model-ungrouped-128, model-ungrouped-512
        as above, with 16 query heads and 16 KV heads of 64
    cache
        bytes of the KV cache of the model with 8 KV heads
    host-knocking-linear, host-knocking-mlp, host-explicit, host-mixture, host-talking, host-differential
    host-gating
        one thread, a model with 8 layers of width 64, 16 tokens cached; baseline: the stock model

    A case takes ten seconds on two cores; all cases take six minutes and 5 GB of memory. Stop other processes before
    you measure times. For example:

    crosshead bench decode grouped-8k cache --rounds 5 --out decode.json
    """
    from crosshead.evals.bench.cases import DECODE

    _check_out(out, overwrite)
    _measure("decode", DECODE, cases, device, rounds, out)


@app.command(cls=StrictCommand)
def compiled(
    cases: Names = None, device: Device = "cpu", rounds: Rounds = 7, out: Out = None, overwrite: Overwrite = False
) -> None:
    """Measure training steps of models compiled by torch.compile.

    The baseline is the compiled stock model. A model has two layers of width 1024 and is compiled as one graph; a step
    has 2048 tokens. Cases:

    \b
    knocking-step, knocking-linear-step, explicit-step, mixture-step, talking-step, differential-step, gating-step

    torch.compile needs a C++ compiler: g++, or the one in CXX. A case takes a minute on two cores. Stop other
    processes before you measure times. For example:

    crosshead bench compiled explicit-step --rounds 3 --out compiled.json
    """
    from crosshead.evals.bench.cases import COMPILED
    from crosshead.evals.bench.models import check_compiler

    check_compiler()
    _check_out(out, overwrite)
    _measure("compiled", COMPILED, cases, device, rounds, out)


@app.command(cls=StrictCommand)
def convert(
    cases: Names = None,
    gigabytes: Annotated[float, typer.Option(min=0.01, max=1000, help="Size of the synthetic checkpoint.")] = 1.0,
    rounds: Rounds = 3,
    out: Out = None,
    overwrite: Overwrite = False,
) -> None:
    """Measure the conversion of a synthetic checkpoint.

    The checkpoint is a Llama in bfloat16. The baseline is `cp -r` of its directory. Cases:

    \b
    neutral          knocking: all tensors are copied, some are added
    calibration      the calibration of component heads on 1024 tokens, without the conversion
    virtual-heads    half as many component heads as KV heads, from a saved calibration

    TMPDIR needs free space for three checkpoints. On two cores, a round of all cases takes about a minute at
    1 GB. At 8 GB, neutral takes 15 seconds, virtual-heads one minute, and calibration ten minutes. For example:

    crosshead bench convert neutral --gigabytes 8 --out convert.json
    """
    from tempfile import TemporaryDirectory

    from crosshead.conversion.bench_convert import Synthetic
    from crosshead.evals.bench.case import choose_cases
    from crosshead.evals.bench.run import bench, bench_lines
    from crosshead.recipes.schema.toy import write_tokenizer

    _check_out(out, overwrite)
    with TemporaryDirectory() as scratch, progress() as show:
        checkpoint = Synthetic(Path(scratch), gigabytes)
        chosen = choose_cases(_conversions(checkpoint), cases or [], "bench convert")
        show("making", 0, 1, f"a checkpoint of {gigabytes:g} GB")
        checkpoint.write(write_tokenizer)
        report = bench(chosen, rounds, progress=show)
    _write(report, bench_lines(report), out)


def _conversions(checkpoint: "Synthetic") -> list["Case"]:
    from crosshead.conversion.bench_convert import MIXERS
    from crosshead.evals.bench.case import RESULT, Case

    config = checkpoint.config
    fields = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    shape = {"bytes": checkpoint.size} | {field: getattr(config, field) for field in fields}
    target = {"neutral": {"cpu": 1.5}}

    def case(name: str) -> "Case":
        def make(ours: bool, **_: Any) -> Any:
            return (lambda: checkpoint.convert(name)["seconds"]) if ours else checkpoint.copy

        description = f"{name.replace('-', ' ')}, a checkpoint of {checkpoint.size / 1e9:.3g} GB"
        baseline, work = "cp -r of the same folder", checkpoint.size
        return Case(
            name, description, baseline, make, shape, target.get(name, {}), RESULT, dtype="bfloat16", work=work
        )

    return [case(name) for name in MIXERS]


@app.command(cls=StrictCommand)
def train(
    cases: Annotated[
        list[str] | None,
        typer.Argument(
            help="knocking-mlp, knocking-linear, explicit, mixture, talking, differential, gating. Default: all."
        ),
    ] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="cpu (float32) or cuda (bfloat16 autocast).")] = "cpu",
    rounds: Annotated[int, typer.Option(min=1, help="Number of ratios measured for each case.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each trainer for one ratio.")] = 5,
    out: Out = None,
    overwrite: Overwrite = False,
) -> None:
    """Measure training with crosshead's trainer and model.

    The baseline is the Trainer of transformers with the stock model. Both train from scratch with the same settings:
    34 million parameters, 512 tokens per sequence. Their short runs alternate. Stop other processes before you
    measure times. For example:

    crosshead bench train knocking-mlp explicit --out train.json
    """
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # both trainers would use a visible GPU; torch is not initialised yet
        os.environ["ACCELERATE_USE_CPU"] = "true"  # both would also use another accelerator
    from crosshead.common.errors import EvalError
    from crosshead.common.torch_state import check_device
    from crosshead.evals.bench.machine import keep_memory
    from crosshead.recipes.bench_train import bench_train, bench_train_lines

    check_device(device, EvalError)
    _check_out(out, overwrite)
    keep_memory()
    with progress() as show:
        report = bench_train(cases or [], rounds, steps, show)
    _write(report | {"device": device}, bench_train_lines(report), out)


def _measure(
    name: str, known: Iterable["Case"], cases: list[str] | None, device: str, rounds: int, out: Path | None
) -> None:
    """Run the named cases, or all cases without names; write and print the report."""
    from crosshead.evals.bench.case import choose_cases
    from crosshead.evals.bench.machine import keep_memory
    from crosshead.evals.bench.run import bench, bench_lines

    chosen = choose_cases(list(known), cases or [], f"bench {name}")
    keep_memory()
    with progress() as show:
        report = bench(chosen, rounds, device, show)
    _write(report, bench_lines(report), out)


def _check_out(out: Path | None, overwrite: bool) -> None:
    """Raise an error before the measurement if the JSON file cannot be written."""
    from crosshead.common.atomic_write import check_targets

    check_targets([out] if out else [], overwrite)


def _write(report: dict[str, Any], lines: Iterable[str], out: Path | None) -> None:
    """Write the report to the JSON file `out`, if it is given, and print the table."""
    from crosshead.common.atomic_write import write_atomically

    if out is not None:
        write_atomically({out: json.dumps(report, indent=2) + "\n"})
    print(*lines, sep="\n")
