"""Multiplication counts of TransNeXt and DiT, derived from their papers, independent of crosshead."""

from typing import Any

WINDOW, BIAS_FEATURES = 9, 512
FIELDS = ("hidden_sizes", "num_attention_heads", "depths", "mlp_ratios", "sr_ratios")


def transnext(fields: dict[str, Any], side: int, labels: int) -> int:
    """Return the multiplications of a TransNeXt classifier without mechanisms for a `side` x `side` image."""
    channels, width, total = 3, side // 4, 0
    columns = [fields[name] for name in FIELDS]
    for stage, (size, heads, depth, ratio, reduction) in enumerate(zip(*columns, strict=True)):
        pixels, kernel = width**2, 3 if stage else 7
        total += pixels * size * channels * kernel**2  # the patch embedding
        inner = 2 * size * ratio // 3
        mlp = pixels * (3 * size * inner + inner * 3 * 3)
        biases = (2 * width - reduction) ** 2 * (2 * BIAS_FEATURES + BIAS_FEATURES * heads)  # per distinct distance
        if reduction == 1:
            attention = 4 * pixels * size**2 + 2 * pixels**2 * size
        else:
            pooled = (width // reduction) ** 2
            linear = 3 * pixels + 2 * (pixels + pooled)  # pooling, query and output projections; keys and values
            attention = linear * size**2 + 2 * pixels * pooled * size
            attention += 3 * pixels * WINDOW * size  # keys, values and learnable tokens of the window
        total += depth * (mlp + attention + biases)
        channels, width = size, width // 2
    return total + channels * labels


def dit(blocks: int, width: int, side: int, patch: int, channels: int, outputs: int) -> tuple[int, int]:
    """Return the multiplications of DiT for a `side` x `side` latent, and of a timestep embedding (256 features)."""
    tokens, embedding = (side // patch) ** 2, 256 * width + width**2
    block = tokens * (4 * width**2 + 8 * width**2) + 2 * tokens**2 * width + 6 * width**2
    last = 2 * width**2 + tokens * width * patch**2 * outputs
    return tokens * patch**2 * channels * width + blocks * block + embedding + last, embedding
