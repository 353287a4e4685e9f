"""Tables of training results: converted models, diffusion transformers, encoders, T5, and training from scratch."""

from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

SIZES = {"S/2": (12, 384, 6), "B/2": (12, 768, 12), "L/2": (24, 1024, 16), "XL/2": (28, 1152, 16)}
"""Name of a DiT size -> number of blocks, width, number of heads."""
SMOLLM2 = {"heads": 9, "kv_heads": 3}
"""Head counts of SmolLM2-135M, arguments of `converted`."""
TASKS = {"piqa_items": ("PIQA", "items"), "blimp_items": ("BLiMP", "pairs")}
"""Task of `benchmark_items.py` -> title of the task, and noun for its items."""
RATES = {
    "plain": "no mechanism",
    "1 x": "as the model's",
    "3 x": "3 times the model's",
    "10 x": "10 times the model's",
}
"""Case of `knocking_rates.py` -> description."""


def converted(name: str, heads: int, kv_heads: int) -> str:
    """The description of a conversion of `recovery.py`, for a model with these head counts."""
    from recovery import CONVERSIONS, HALF, conversion

    if name not in CONVERSIONS:
        return name
    if name == HALF:
        return "`explicit`, `--cache 50%`"
    (options,) = conversion(name, heads, kv_heads)[0].values()
    if name.startswith("explicit"):
        return f"`explicit`, {options['key_heads']} of {kv_heads} component heads"
    return f"`mixture`, {options['active_heads']} of {heads} heads active"


def cases(report: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any], Mapping[str, Any] | None]]:
    """Per conversion: description, loss increase before training, and the runs with transfer steps and without."""
    for name, result in report.items():
        # Skip controls, and -direct runs, which are in the row of their conversion.
        if result["before"] == result["source"] or name.endswith("-direct"):
            continue
        description = converted(name, **{key: result.get(key, number) for key, number in SMOLLM2.items()})
        yield description, f"{result['before'] - result['source']:.3f}", result, report.get(f"{name}-direct")


def recovery_table(report: Mapping[str, Any]) -> str:
    """Table of the loss increase before and after training, for several models."""
    heads = "before training | after training | tokens until 0.05 or less"
    lines = [f"| model | converted to | {heads} | without a transfer: after training | tokens until 0.05 or less |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for model, of_model in report.items():
        for description, start, *trainings in cases(of_model):
            cells = [cell for training in trainings for cell in _recovery_cells(training)]
            lines.append(f"| {model} | {description} | {start} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _recovery_cells(result: Mapping[str, Any] | None) -> tuple[str, str]:
    """The loss increase over the control after training, and the number of tokens until it stays near; else empty."""
    if result is None or "control" not in result:
        return "", ""
    near = result["tokens_until_near"]
    return f"{result['above_control']:.3f}", "never" if near is None else f"{near:,} tokens"


def accuracy_table(report: Mapping[str, Any]) -> str:
    """Table of accuracies per task; for a converted model the difference from the source with its interval."""
    models = report["models"]
    items = {task: scores["items"] for task, scores in models["source"].items()}
    heads = [f"{TASKS[task][0]} ({number:,} {TASKS[task][1]})" for task, number in items.items()]
    lines = [f"| SmolLM2-135M | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(heads)}"]
    for name, scores in models.items():
        model = name.removesuffix("-trained")
        description = converted(model, **SMOLLM2) + (", trained" if name != model else "")
        lines.append(f"| {description} | {' | '.join(_accuracy(scores[task]) for task in items)} |")
    return "\n".join(lines) + "\n"


def _accuracy(score: Mapping[str, Any]) -> str:
    if "change" not in score:
        return f"{score['score']:.1%}"
    low, high = (f"{100 * bound:+.1f}" for bound in score["interval"])
    return f"{100 * score['change']:+.1f} ({low} to {high})"


def knocking_table(report: Mapping[str, Any]) -> str:
    """Table of loss and drift for each learning rate of the mechanism; the plain model is the first row."""
    lines = ["| learning rate of the mechanism | held-out loss | difference from the plain model | drift |"]
    lines.append("| --- | ---: | ---: | ---: |")
    for name, result in report["cases"].items():
        mean = fmean(result["losses"].values())
        cells = ["", ""] if name == "plain" else [_difference(result, "beside_plain"), f"{result['drift']:.4f}"]
        lines.append(f"| {RATES.get(name, name)} | {mean:.4f} | {' | '.join(cells)} |")
    return "\n".join(lines) + f"\n\n{report['tokens']:,} tokens; {_seeds(report['cases'])} seeds.\n"


def scratch_table(report: Mapping[str, Any]) -> str:
    """Table of the losses after training from scratch, means and standard deviations over seeds."""
    lines = ["| | held-out loss | difference from the baseline |", "| --- | ---: | ---: |"]
    for name, result in report["losses"].items():
        difference = _difference(result, "beside_baseline") if result["mixers"] else ""
        lines.append(f"| {name} | {result['mean']:.4f} | {difference} |")
    layers = report["shape"]["num_hidden_layers"]
    return "\n".join(lines) + f"\n\n{layers} layers; {report['tokens']:,} tokens; {_seeds(report['losses'])} seeds.\n"


def _difference(result: Mapping[str, Any], key: str) -> str:
    """The mean difference over seeds, with the standard deviation if there are several seeds."""
    spread = "" if result["spread_beside"] is None else f" ± {result['spread_beside']:.4f}"
    return f"{result[key]:+.4f}{spread}"


def _seeds(cases: Mapping[str, Any]) -> int:
    """The number of seeds."""
    return max(len(result["losses"]) for result in cases.values())


def parameters(blocks: int, width: int, heads: int) -> tuple[int, int]:
    """The number of parameters of a DiT, and of the routers that MoH adds.

    Counted as in the papers: one embedding of time and class, although diffusers has one per block, and including
    the fixed position embeddings.
    """
    import torch

    from crosshead.modeling.dit import CrossheadDiTTransformer2DModel

    mixers = {"mixture": {"active_heads": heads - 1}}
    with torch.device("meta"):
        model = CrossheadDiTTransformer2DModel(heads, width // heads, out_channels=8, num_layers=blocks, mixers=mixers)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    copies = sum(size for name, size in sizes.items() if ".norm1.emb." in name) * (blocks - 1) // blocks
    new = sum(size for name, size in sizes.items() if ".mixers." in name)
    return sum(sizes.values()) - copies - new + model.pos_embed.pos_embed.numel(), new


def parameter_table() -> str:
    """Table of the parameters of DiT with and without routers, for the four sizes of the papers."""
    lines = ["| | parameters | routers | with routers |", "| --- | ---: | ---: | ---: |"]
    for name, size in SIZES.items():
        stock, new = parameters(*size)
        lines.append(f"| DiT-{name} | {stock:,} | {new:,} | {stock + new:,} |")
    return "\n".join(lines) + "\n"


def diffusion_table(report: Mapping[str, Any]) -> str:
    """Table of the held-out losses of DiT, and differences from the baseline with the same seed."""
    lines = ["| | held-out loss | beside the baseline |", "| --- | ---: | ---: |"]
    for name, result in report["losses"].items():
        first = not any(result["mixers"].values())
        difference = "" if first else f"{result['beside_baseline']:+.4f} ± {result['spread_beside']:.4f}"
        lines.append(f"| {name} | {result['mean']:.4f} ± {result['spread']:.4f} | {difference} |")
    seeds = _seeds(report["losses"])
    shape = report["shape"]
    lines.append("")
    lines.append(
        f"Mean squared error of the predicted noise, of averaged weights; means and standard deviations over {seeds} "
        f"seeds. {shape['num_layers']} blocks of {shape['num_attention_heads']} heads, {report['steps']} steps of "
        f"{report['batch']} images (`make measure-diffusion`)."
    )
    return "\n".join(lines) + "\n"


def objectives_table(report: Mapping[str, Any]) -> str:
    """Table of the held-out losses of encoders and T5 trained from scratch, and differences from the baseline."""
    lines = ["| | | held-out loss | beside the baseline | right |", "| --- | --- | ---: | ---: | ---: |"]
    for objective, measured in report.items():
        for name, result in measured["losses"].items():
            difference = (
                "" if not result["mixers"] else f"{result['beside_baseline']:+.4f} ± {result['spread_beside']:.4f}"
            )
            loss = f"{result['mean']:.4f} ± {result['spread']:.4f}"
            lines.append(f"| {objective} | {name} | {loss} | {difference} | {result['accuracy']:.1%} |")
    one = next(iter(report.values()))
    seeds = _seeds(one["losses"])
    lines += [
        "",
        f"Means and standard deviations over {seeds} seeds; {one['steps']} steps of {one['batch']} examples.",
    ]
    return "\n".join(lines) + "\n"
