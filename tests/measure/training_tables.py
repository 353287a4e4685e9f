"""The tables of small trainings: of diffusion, with its parameters, and of encoders and T5."""

from collections.abc import Mapping
from typing import Any

SIZES = {"S/2": (12, 384, 6), "B/2": (12, 768, 12), "L/2": (24, 1024, 16), "XL/2": (28, 1152, 16)}
"""DiT's name -> blocks, width, heads."""


def parameters(blocks: int, width: int, heads: int) -> tuple[int, int]:
    """Of DiT, and of the routers that MoH adds.

    The papers' DiT has one embedding of time and class, of which diffusers gives each block a copy; it counts its
    fixed table of positions.
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
    """The four sizes of the papers."""
    lines = ["| | parameters | routers | with routers |", "| --- | ---: | ---: | ---: |"]
    for name, size in SIZES.items():
        stock, new = parameters(*size)
        lines.append(f"| DiT-{name} | {stock:,} | {new:,} | {stock + new:,} |")
    return "\n".join(lines) + "\n"


def diffusion_table(report: Mapping[str, Any]) -> str:
    """Held-out losses, and differences from the baseline of the same seed."""
    lines = ["| | held-out loss | beside the baseline |", "| --- | ---: | ---: |"]
    for name, found in report["losses"].items():
        first = not any(found["mixers"].values())
        beside = "" if first else f"{found['beside_baseline']:+.4f} ± {found['spread_beside']:.4f}"
        lines.append(f"| {name} | {found['mean']:.4f} ± {found['spread']:.4f} | {beside} |")
    seeds = max(len(found["losses"]) for found in report["losses"].values())
    shape = report["shape"]
    lines.append("")
    lines.append(
        f"Mean squared error of the predicted noise, of averaged weights; means and standard deviations over {seeds} "
        f"seeds. {shape['num_layers']} blocks of {shape['num_attention_heads']} heads, {report['steps']} steps of "
        f"{report['batch']} images (`make measure-diffusion`)."
    )
    return "\n".join(lines) + "\n"


def objectives_table(report: Mapping[str, Any]) -> str:
    """Held-out losses of encoders and T5 from scratch, and differences from the baseline of the same seed."""
    lines = ["| | | held-out loss | beside the baseline | right |", "| --- | --- | ---: | ---: | ---: |"]
    for objective, measured in report.items():
        for name, found in measured["losses"].items():
            beside = "" if not found["mixers"] else f"{found['beside_baseline']:+.4f} ± {found['spread_beside']:.4f}"
            loss = f"{found['mean']:.4f} ± {found['spread']:.4f}"
            lines.append(f"| {objective} | {name} | {loss} | {beside} | {found['accuracy']:.1%} |")
    one = next(iter(report.values()))
    seeds = max(len(found["losses"]) for found in one["losses"].values())
    lines += [
        "",
        f"Means and standard deviations over {seeds} seeds; {one['steps']} steps of {one['batch']} examples.",
    ]
    return "\n".join(lines) + "\n"
