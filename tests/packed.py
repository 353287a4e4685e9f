"""Reads the packed numbers of a report of `crosshead inspect`, as the page does."""

import base64
import zlib

import numpy as np
import torch


def unpack(packed):
    """The stored integers, as floats."""
    raw = zlib.decompress(base64.b64decode(packed["data"]))
    return np.frombuffer(raw, {8: "<i1", 16: "<i2"}[packed["bits"]]).astype(float)


def numbers(packed):
    """The tensor."""
    return torch.tensor(unpack(packed) * packed["scale"]).reshape(packed["shape"])


def maps(packed):
    """Attention maps, which are stored as roots of weights in 127 levels."""
    levels = torch.tensor(unpack(packed)).reshape(packed["shape"]) / 127
    return levels.sign() * levels.square() * packed["scale"]
