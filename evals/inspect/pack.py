"""Packs tensors into JSON: rounded to 8 or 16 bits, deflated, in base64, so that a browser needs no library.

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
"""Number of significant digits of a plain number."""


def pack_numbers(values: torch.Tensor) -> dict[str, Any]:
    """Pack any tensor as integers of 16 bits."""
    scale = _maximum(values) / NUMBER_LEVELS or 1.0
    return _packed((values.double() / scale).round().to(torch.int16), scale)


def pack_indices(indices: torch.Tensor) -> dict[str, Any]:
    """Pack integers below 32768, without a scale."""
    return _packed(indices.to(torch.int16), 1)


def pack_maps(weights: torch.Tensor, smallest_scale: float = 1.0) -> dict[str, Any]:
    """Pack attention weights (maps, T, S); `scale` is the largest weight, but at least `smallest_scale`."""
    scale = max(smallest_scale, _maximum(weights)) or 1.0
    shares = weights.double() / scale
    levels = (shares.sign() * shares.abs().sqrt() * MAP_LEVELS).round()
    return _packed(levels.to(torch.int8), scale)


def pack_picture(colours: torch.Tensor) -> dict[str, Any]:
    """Pack colours (height, width, channels) from 0 to 1 as unsigned integers of 8 bits."""
    return _packed((colours * PICTURE_LEVELS).round().to(torch.uint8), 1 / PICTURE_LEVELS)


def plain(values: torch.Tensor) -> list[Any]:
    """Return a small tensor as nested lists of rounded numbers."""
    return [plain(each) if each.ndim else rounded(each.item()) for each in values]


def rounded(number: float) -> float | None:
    """Return a number with few digits; None if it is not finite, which JSON cannot express."""
    return float(f"{number:.{DIGITS}g}") if math.isfinite(number) else None


def _maximum(values: torch.Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _packed(integers: torch.Tensor, scale: float) -> dict[str, Any]:
    raw = integers.contiguous().numpy()
    data = b64encode(compress(raw.astype(raw.dtype.newbyteorder("<")).tobytes(), 9))
    return {"shape": list(raw.shape), "bits": raw.itemsize * 8, "scale": scale, "data": data.decode("ascii")}
