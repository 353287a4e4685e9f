"""Tables of the speeds measured by `crosshead bench` and by tests/gpu_check.py."""

from collections.abc import Iterator
from pathlib import Path

from result_files import RESULTS, Content, option_text, written_by

from crosshead.evals.bench.run import amount, spread, verdict

SPEEDS = {
    "attention": "Attention and models",
    "attention_zen5": "Attention, on a newer processor (Zen 5)",
    "compiled": "Compiled models",
    "decode": "Decoding",
    "decode_zen5": "Decoding, on a newer processor (Zen 5)",
    "convert": "Conversion",
}
"""Name of a file in `evals/results/`, which begins with the subcommand of `crosshead bench` -> table heading."""
ON_A_GPU = "python tests/gpu_check.py speed OUT.json"
"""The command that writes gpu.json."""


def speed_tables(folder: Path = RESULTS) -> str:
    """All tables: measurements, baselines and targets."""
    parts = [
        (title, f"{name}.json", f"crosshead bench {name.partition('_')[0]}", speed_table)
        for name, title in SPEEDS.items()
    ]
    parts.append(("Training", "train.json", "crosshead bench train", train_table))
    parts.append(("On a GPU", "gpu.json", ON_A_GPU, gpu_table))
    tables = [f"### {title}\n\n{written_by(folder / file, by, table)()}" for title, file, by, table in parts]
    return "\n" + "\n".join(tables) + "\n"


def speed_table(report: Content) -> str:
    """The table of one report of `crosshead bench`."""
    return "\n".join(speed_lines(report)) + "\n"


def train_table(report: Content) -> str:
    """Table of training speeds relative to transformers' Trainer with the stock model."""
    lines = ["| model | options | tokens a second, relative to Trainer with the stock model (range) |"]
    lines.append("| --- | --- | ---: |")
    for name, speeds in report["tokens_per_second"].items():
        options = ", ".join(
            f"{key}: {option_text(value)}" for mixer in speeds["mixers"].values() for key, value in mixer.items()
        )
        ratios = speeds["ratios"]
        lines.append(
            f"| `{name}` | {options} | {speeds['median_ratio']:.3f} ({min(ratios):.3f} to {max(ratios):.3f}) |"
        )
    run = report["settings"]
    return "\n".join([*lines, "", f"{_machine(report)}; {run['rounds']} rounds of {run['steps']} steps."]) + "\n"


def gpu_table(report: Content) -> str:
    """Tables of wall-clock times and of GPU times of functions, and the kernel launches of a `talking` layer."""
    lines: list[str] = []
    report = report["speed"]
    for part, title in (("called", "As called"), ("queued", "By the GPU's own clock")):
        lines += ["", f"{title}:", "", *speed_lines(report[part])]
    counts = ", ".join(f"{count} {name}" for name, count in report["launches"].items())
    lines += ["", f"Kernels that a layer of `talking` starts, batch 8, 32 heads, 2,048 tokens: {counts}."]
    return "\n".join(lines) + "\n"


def speed_lines(report: Content) -> Iterator[str]:
    """The lines of a report's table, and a line with the machine and versions."""
    yield "| case | what | baseline | time | time of the baseline | ratio (quartiles) | target |"
    yield "| --- | --- | --- | ---: | ---: | ---: | --- |"
    for name, case in report["cases"].items():
        sides = [amount(case[f"median_{side}"], case["unit"]) for side in ("ours", "baseline")]
        if "bytes_per_second" in case:
            speeds = (amount(rate, "bytes") for rate in case["bytes_per_second"])
            sides = [f"{side}, {speed}/s" for side, speed in zip(sides, speeds, strict=True)]
        cells = [case["what"], case["compared_with"], *sides, f"{case['median_ratio']:.3f} ({spread(case)})"]
        yield f"| `{name}` | {' | '.join(cells)} | {verdict(case)} |"
    cases = list(report["cases"].values())
    rounds, dtypes = (sorted({str(case[key]) for case in cases}) for key in ("rounds", "dtype"))
    yield ""
    yield f"{_machine(report)}; {' or '.join(dtypes)}; {' or '.join(rounds)} rounds."


def _machine(report: Content) -> str:
    machine = report["machine"]
    device = machine["accelerator"] if "cuda" in report["device"] else machine["processor"]
    versions = ", ".join(f"{package} {machine[package]}" for package in ("torch", "transformers"))
    return f"{device}, {machine['threads']} threads, {versions}"
