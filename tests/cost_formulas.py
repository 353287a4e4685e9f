"""The multiplications of TransNeXt and DiT, written down from their papers; they import nothing of ours."""

from typing import Any

WINDOW, BIAS_FEATURES = 9, 512
FIELDS = ("hidden_sizes", "num_attention_heads", "depths", "mlp_ratios", "sr_ratios")


def transnext(fields: dict[str, Any], side: int, labels: int) -> int:
    """Of a classifier without mechanisms, for one image of `side` x `side` pixels."""
    channels, width, total = 3, side // 4, 0
    columns = [fields[name] for name in FIELDS]
    for stage, (size, heads, depth, ratio, reduction) in enumerate(zip(*columns, strict=True)):
        pixels, kernel = width**2, 3 if stage else 7
        total += pixels * size * channels * kernel**2  # the patches
        inner = 2 * size * ratio // 3
        mlp = pixels * (3 * size * inner + inner * 3 * 3)
        biases = (2 * width - reduction) ** 2 * (2 * BIAS_FEATURES + BIAS_FEATURES * heads)  # of different distances
        if reduction == 1:
            attention = 4 * pixels * size**2 + 2 * pixels**2 * size
        else:
            pooled = (width // reduction) ** 2
            linear = 3 * pixels + 2 * (pixels + pooled)  # the pooled map, queries and outputs; keys and values
            attention = linear * size**2 + 2 * pixels * pooled * size
            attention += 3 * pixels * WINDOW * size  # keys, values and learnt tokens of the window
        total += depth * (mlp + attention + biases)
        channels, width = size, width // 2
    return total + channels * labels


def dit(blocks: int, width: int, side: int, patch: int, channels: int, outputs: int) -> tuple[int, int]:
    """Of DiT, for one latent of `side` x `side`; and of one embedding of time, which has 256 frequencies."""
    tokens, embedding = (side // patch) ** 2, 256 * width + width**2
    block = tokens * (4 * width**2 + 8 * width**2) + 2 * tokens**2 * width + 6 * width**2
    last = 2 * width**2 + tokens * width * patch**2 * outputs
    return tokens * patch**2 * channels * width + blocks * block + embedding + last, embedding
