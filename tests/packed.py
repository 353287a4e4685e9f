"""Decodes the packed arrays in a report of `crosshead inspect`, like the page's JavaScript."""

import base64
import zlib

import numpy as np
import torch


def unpack(packed):
    """Return the stored integers as a flat float array."""
    raw = zlib.decompress(base64.b64decode(packed["data"]))
    return np.frombuffer(raw, {8: "<i1", 16: "<i2"}[packed["bits"]]).astype(float)


def numbers(packed):
    """Return a packed tensor: integers times scale, in its shape."""
    return torch.tensor(unpack(packed) * packed["scale"]).reshape(packed["shape"])


def maps(packed):
    """Return packed attention maps, which store the square root of each weight in 127 levels."""
    levels = torch.tensor(unpack(packed)).reshape(packed["shape"]) / 127
    return levels.sign() * levels.square() * packed["scale"]
