"""The published checkpoints of TransNeXt and MoH-ViT: sizes, tensor names and tensor shapes.

Written by hand from the modules of DaiShiResearch/TransNeXt and SkyworkAI/MoH (MoH-ViT).
"""

from collections.abc import Iterator
from typing import Any

PUBLISHED_SIZES: dict[str, dict[str, Any]] = {
    "micro": {"hidden_sizes": [48, 96, 192, 384], "num_attention_heads": [2, 4, 8, 16], "depths": [2, 2, 15, 2]},
    "tiny": {"hidden_sizes": [72, 144, 288, 576], "num_attention_heads": [3, 6, 12, 24], "depths": [2, 2, 15, 2]},
    "small": {"hidden_sizes": [72, 144, 288, 576], "num_attention_heads": [3, 6, 12, 24], "depths": [5, 5, 22, 5]},
    "base": {"hidden_sizes": [96, 192, 384, 768], "num_attention_heads": [4, 8, 16, 32], "depths": [5, 5, 23, 5]},
}
STAGES = {"mlp_ratios": [8, 8, 4, 4], "sr_ratios": [8, 4, 2, 1]}
ALL_AGGREGATED = {**PUBLISHED_SIZES["micro"], **STAGES, "sr_ratios": [16, 8, 4, 2]}
"""The micro model with aggregated (windowed) attention in the last stage, too."""
PUBLISHED_MIXTURES: dict[str, tuple[str, list[int], list[int]]] = {
    "small_80": ("small", [3, 6, 3, 8], [0, 0, 6, 12]),
    "small_75": ("small", [3, 6, 3, 4], [0, 0, 6, 12]),
    "base_75": ("base", [4, 8, 4, 5], [0, 0, 8, 16]),
    "base_50": ("base", [2, 2, 2, 4], [2, 4, 6, 8]),
}
"""MoH-ViT: the model size, the shared heads per stage, and the selected routed heads per stage."""


def mixture_of(fields: dict[str, Any], shared: list[int], selected: list[int]) -> dict[str, Any]:
    """Return the `mixers` of a crosshead config, with one count per layer."""
    counts = list(zip(shared, selected, fields["depths"], strict=True))
    return {
        "mixture": {
            "active_heads": [always + routed for always, routed, depth in counts for _ in range(depth)],
            "shared_heads": [always for always, _, depth in counts for _ in range(depth)],
        }
    }


def published_tensors(
    fields: dict[str, Any], labels: int, shared: list[int] | None = None, selected: list[int] | None = None
) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor in a checkpoint: of MoH-ViT if head counts are given, else of TransNeXt."""
    tensors = {"head.weight": (labels, fields["hidden_sizes"][-1]), "head.bias": (labels,)}
    for stage, size in enumerate(fields["hidden_sizes"]):
        channels, kernel = (fields["hidden_sizes"][stage - 1], 3) if stage else (3, 7)
        start = f"patch_embed{stage + 1}"
        tensors |= {f"{start}.proj.weight": (size, channels, kernel, kernel), f"{start}.proj.bias": (size,)}
        tensors |= affine(f"{start}.norm", size) | affine(f"norm{stage + 1}", size)
        for block in range(fields["depths"][stage]):
            prefix = f"block{stage + 1}.{block}"
            for name, shape in block_tensors(fields, stage):
                tensors[f"{prefix}.{name}"] = shape
            if shared is not None and selected is not None:
                routers = router_tensors(fields, stage, shared[stage], selected[stage])
                tensors |= {f"{prefix}.attn.{name}.weight": shape for name, shape in routers}
    return tensors


def affine(name: str, size: int) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the parameters of a LayerNorm."""
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def dense(name: str, outputs: int, inputs: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names and shapes of the parameters of an nn.Linear."""
    return [(f"{name}.weight", (outputs, inputs)), (f"{name}.bias", (outputs,))]


def block_tensors(fields: dict[str, Any], stage: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of one block's parameters, without routers."""
    size, heads = fields["hidden_sizes"][stage], fields["num_attention_heads"][stage]
    inner = int(2 * size * fields["mlp_ratios"][stage] / 3)
    yield from [*affine("norm1", size).items(), *affine("norm2", size).items()]
    yield from dense("mlp.fc1", 2 * inner, size) + dense("mlp.fc2", size, inner)
    yield from [("mlp.dwconv.dwconv.weight", (inner, 1, 3, 3)), ("mlp.dwconv.dwconv.bias", (inner,))]
    yield from dense("attn.proj", size, size)
    yield from dense("attn.cpb_fc1", 512, 2) + dense("attn.cpb_fc2", heads, 512)
    yield from [("attn.temperature", (heads, 1, 1)), ("attn.query_embedding", (heads, 1, size // heads))]
    if fields["sr_ratios"][stage] == 1:
        yield from dense("attn.qkv", 3 * size, size)
        return
    yield from dense("attn.q", size, size) + dense("attn.kv", 2 * size, size)
    yield from [("attn.sr.weight", (size, size, 1, 1)), ("attn.sr.bias", (size,)), *affine("attn.norm", size).items()]
    yield "attn.relative_pos_bias_local", (heads, 9)
    yield from [("attn.learnable_tokens", (heads, size // heads, 9)), ("attn.learnable_bias", (heads, 1, 9))]


def router_tensors(
    fields: dict[str, Any], stage: int, shared: int, selected: int
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield MoH-ViT's router weights of a layer: `wg` routed heads, `wg_0` shared or routed, `wg_1` shared heads."""
    size, heads = fields["hidden_sizes"][stage], fields["num_attention_heads"][stage]
    if selected:
        yield "wg", (heads - shared, size)
    if selected and shared:
        yield "wg_0", (2, size)
    if shared > 1:
        yield "wg_1", (shared, size)
