"""Tensors as JSON: rounded to 8 or 16 bits, deflated, in base64, which a browser can decode without a library.

A number is the stored integer times `scale`. Attention maps are stored as the square root of each weight, because most
weights are small.
"""

import math
from base64 import b64encode
from typing import Any
from zlib import compress

import torch

MAP_LEVELS = 127
NUMBER_LEVELS = 32767
PICTURE_LEVELS = 255
DIGITS = 5


def pack_numbers(values: torch.Tensor) -> dict[str, Any]:
    """Any tensor, in 16 bits."""
    scale = _maximum(values) / NUMBER_LEVELS or 1.0
    return _packed((values.double() / scale).round().to(torch.int16), scale)


def pack_indices(indices: torch.Tensor) -> dict[str, Any]:
    """Integers below 32768, without a scale."""
    return _packed(indices.to(torch.int16), 1)


def pack_maps(weights: torch.Tensor, smallest_scale: float = 1.0) -> dict[str, Any]:
    """Attention weights (maps, T, S); `scale`, at least the smallest, is the weight of the highest level."""
    scale = max(smallest_scale, _maximum(weights)) or 1.0
    shares = weights.double() / scale
    levels = (shares.sign() * shares.abs().sqrt() * MAP_LEVELS).round()
    return _packed(levels.to(torch.int8), scale)


def pack_picture(colours: torch.Tensor) -> dict[str, Any]:
    """Colours (height, width, channels) from 0 to 1, as unsigned numbers of 8 bits."""
    return _packed((colours * PICTURE_LEVELS).round().to(torch.uint8), 1 / PICTURE_LEVELS)


def plain(values: torch.Tensor) -> list[Any]:
    """A small tensor as numbers."""
    return [plain(each) if each.ndim else rounded(each.item()) for each in values]


def rounded(number: float) -> float | None:
    """A number with few digits; None if it is not finite, which JSON cannot express."""
    return float(f"{number:.{DIGITS}g}") if math.isfinite(number) else None


def _maximum(values: torch.Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _packed(integers: torch.Tensor, scale: float) -> dict[str, Any]:
    raw = integers.contiguous().numpy()
    data = b64encode(compress(raw.astype(raw.dtype.newbyteorder("<")).tobytes(), 9))
    return {"shape": list(raw.shape), "bits": raw.itemsize * 8, "scale": scale, "data": data.decode("ascii")}
