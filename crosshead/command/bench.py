"""`crosshead bench`: speeds beside a named rival, measured in turn in one run."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from crosshead_command.bench_report import check, measure, print_lines, tell, write
from crosshead_command.screen import progress
from crosshead_command.strict import StrictCommand

if TYPE_CHECKING:
    from crosshead.conversion.bench_convert import Synthetic
    from crosshead.evals.bench.case import Case

app = typer.Typer(
    help="Measure speed and memory beside a baseline.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Names = Annotated[list[str] | None, typer.Argument(help="Names from the list above; all if none is named.")]
Device = Annotated[
    Literal["cpu", "cuda"],
    typer.Option(
        help="cpu in float32; cuda in bfloat16, attention alone by Triton's kernels where Triton is installed."
    ),
]
Rounds = Annotated[int, typer.Option(min=1, help="Runs of each side; of memory, 3 at most.")]
Out = Annotated[Path | None, typer.Option(help="Also write all figures, machine and versions as JSON.")]


@app.callback()
def options() -> None:
    """What holds for every measurement."""


@app.command(cls=StrictCommand)
def attention(cases: Names = None, device: Device = "cpu", rounds: Rounds = 7, out: Out = None) -> None:
    """Attention of each mechanism, and models with it: time, and peak memory.

    Attention has 16 heads of 64, models two layers of 1024. Memory on a CPU is the system's count of a process of its
    own, on a GPU the allocator's. Each name is a figure:

    \b
    mixture-half-1024, mixture-half-2048, mixture-half-4096, mixture-half-8192, mixture-half-padded-2048
        tokens; 8 heads of 16 active, 4 of these always; beside torch's dense attention
    mixture-half-unshared-2048, mixture-half-unshared-4096
        8 heads active, none always
    mixture-three-quarters-1024, mixture-three-quarters-2048, mixture-three-quarters-4096
        12 heads active, 6 of these always
    mixture-most-2048
        14 heads active, 7 of these always, where dense attention is as quick
    mixture-gradients-2048, mixture-gradients-4096, mixture-three-quarters-gradients-2048
        8 heads active, 4 of these always, forward and backward; 12 and 6
    mixture-published-4096
        8 heads active, 4 of these always, by the function that a published model brings
    talking-forward, talking-gradients, talking-forward-memory, talking-gradients-memory
        4096 tokens; beside eager attention that mixes heads too
    talking-forward-beside-sdpa, talking-gradients-beside-sdpa
    talking-forward-memory-beside-sdpa, talking-gradients-memory-beside-sdpa
        the same, beside stock attention, which does not
    talking-published-beside-sdpa
        by the function that a published model brings
    mixture-prompt, knocking-linear-prompt, knocking-linear-token
        a prompt of 4096 or 2048 tokens, a token after 2048; beside the stock model
    knocking-step, knocking-linear-step, explicit-step, mixture-step, talking-step, differential-step, gating-step
    knocking-step-memory, knocking-linear-step-memory, explicit-step-memory
    mixture-step-memory, talking-step-memory, differential-step-memory, gating-step-memory
        a training step of a model, 2048 tokens; beside the stock model

    A figure takes half a minute or less on two cores; eager attention, steps and memory one to three minutes; all of
    them half an hour, and 6 GB of memory. Times mean something only where nothing else runs. For example:

    crosshead bench attention mixture-half-4096 talking-forward --out attention.json
    """
    from crosshead.evals.bench.cases import ATTENTION

    measure("attention", ATTENTION, cases, device, rounds, out)


@app.command(cls=StrictCommand)
def decode(cases: Names = None, device: Device = "cpu", rounds: Rounds = 15, out: Out = None) -> None:
    """Decoding one token with `explicit`; and what each mechanism costs beside arithmetic.

    Each name is a figure, with the tokens that the new one meets. `explicit` has half as many components as KV heads.

    \b
    grouped-128, grouped-512, grouped-2k, grouped-8k, grouped-32k
    grouped-128-batch-8, grouped-512-batch-8, grouped-2k-batch-8, grouped-8k-batch-8, grouped-32k-batch-8
        32 query heads and 8 KV heads of 128; of eight sequences
    grouped-8k-padded, grouped-32k-padded
        with the mask of a padded sequence
    grouped-8k-normed, grouped-32k-normed
        with keys that the backbone norms, as Qwen3's are
    grouped-8k-two, grouped-32k-two
        two new tokens at once
    ungrouped-128, ungrouped-512, ungrouped-2k, ungrouped-8k, ungrouped-32k
    ungrouped-128-batch-8, ungrouped-512-batch-8, ungrouped-2k-batch-8, ungrouped-8k-batch-8, ungrouped-32k-batch-8
        16 query heads and 16 KV heads of 64; of eight sequences
    many-2k, many-8k, many-32k
        32 query heads and 32 KV heads of 128
    few-2k, few-8k
        14 query heads and 2 KV heads of 64
    control-batch-1, control-batch-8
        stock attention beside itself: how far from 1 a figure may be by chance
    model-128, model-512, model-16k
        a whole model with two layers of 1024, 32 query heads and 8 KV heads of 128; beside the stock model
    model-ungrouped-128, model-ungrouped-512
        the same with 16 query heads and 16 KV heads of 64
    cache
        bytes of that model's cache
    host-knocking-linear, host-knocking-mlp, host-explicit, host-mixture, host-talking, host-differential
    host-gating
        a token after 16 others, a model with 8 layers of 64, on one thread; beside the stock model

    A figure takes ten seconds on two cores, all of them six minutes, and 5 GB of memory. Times mean
    something only where nothing else runs. For example:

    crosshead bench decode grouped-8k cache --rounds 5 --out decode.json
    """
    from crosshead.evals.bench.cases import DECODE

    measure("decode", DECODE, cases, device, rounds, out)


@app.command(cls=StrictCommand)
def compiled(cases: Names = None, device: Device = "cpu", rounds: Rounds = 7, out: Out = None) -> None:
    """Training steps of models with each mechanism, compiled in one graph; beside the stock model, compiled as well.

    Models have two layers of 1024, and a text 2048 tokens. Each name is a figure:

    \b
    knocking-step, knocking-linear-step, explicit-step, mixture-step, talking-step, differential-step, gating-step

    torch needs a C++ compiler for it (g++, or what CXX names). A figure takes a minute on two cores. Times
    mean something only where nothing else runs. For example:

    crosshead bench compiled explicit-step --rounds 3 --out compiled.json
    """
    from crosshead.evals.bench.cases import COMPILED
    from crosshead.evals.bench.models import check_compiler

    check_compiler()
    measure("compiled", COMPILED, cases, device, rounds, out)


@app.command(cls=StrictCommand)
def convert(
    cases: Names = None,
    gigabytes: Annotated[
        float, typer.Option(min=0.01, max=1000, help="Size of the checkpoint that is made for it.")
    ] = 1.0,
    rounds: Rounds = 3,
    out: Out = None,
) -> None:
    """Conversion of a Llama-shaped bf16 checkpoint, made for this; beside `cp -r` of its folder.

    \b
    neutral          knocking: every tensor is copied, some are added
    calibration      what virtual heads learn from 1024 tokens of text, and nothing else
    virtual-heads    half as many component heads as KV heads, from a saved calibration

    It needs three times the size of the checkpoint where temporary files are (TMPDIR). A round of all three takes a
    minute or so at 1 GB on two cores; at 8 GB, neutral a quarter of one, virtual-heads six, calibration half an hour.
    For example:

    crosshead bench convert neutral --gigabytes 8 --out convert.json
    """
    from tempfile import TemporaryDirectory

    from crosshead.conversion.bench_convert import Synthetic
    from crosshead.evals.bench.case import choose_cases
    from crosshead.evals.bench.run import bench
    from crosshead.recipes.schema.toy import write_tokenizer

    check(out)
    with TemporaryDirectory() as scratch, progress() as show:
        checkpoint = Synthetic(Path(scratch), gigabytes)
        wanted = choose_cases(_conversions(checkpoint), cases or [], "bench convert")
        show("making", 0, 1, f"a checkpoint of {gigabytes:g} GB")
        checkpoint.write(write_tokenizer)
        report = bench(wanted, rounds, progress=show)
    tell(report, out)


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

        what = f"{name.replace('-', ' ')}, a checkpoint of {checkpoint.size / 1e9:.3g} GB"
        rival, work = "cp -r of the same folder", checkpoint.size
        return Case(name, what, rival, make, shape, target.get(name, {}), RESULT, dtype="bfloat16", work=work)

    return [case(name) for name in MIXERS]


@app.command(cls=StrictCommand)
def train(
    cases: Annotated[
        list[str] | None,
        typer.Argument(
            help="knocking-mlp, knocking-linear, explicit, mixture, talking, differential, gating; all by default."
        ),
    ] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="cpu in float32, cuda in autocast bfloat16.")] = "cpu",
    rounds: Annotated[int, typer.Option(min=1, help="Ratios that are taken of each case.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each side that make a ratio.")] = 5,
    out: Out = None,
) -> None:
    """Training: our trainer and model beside transformers' Trainer and the stock model, same shape, same settings.

    From scratch, with 34 million parameters and 512 tokens to a sequence; their steps are made in turn. Times mean
    something only where nothing else runs. For example:

    crosshead bench train knocking-mlp explicit --out train.json
    """
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # both trainers take the GPU that they see; torch has not looked yet
    from transformers.utils.logging import disable_progress_bar

    from crosshead.evals.bench.case import check_device
    from crosshead.evals.bench.machine import keep_memory
    from crosshead.recipes.bench_train import bench_train, bench_train_lines

    check_device(device)
    check(out)
    keep_memory()
    disable_progress_bar()
    with progress() as show:
        report = bench_train(cases or [], rounds, steps, show)
    write(report | {"device": device}, out)
    print_lines(bench_train_lines(report))
