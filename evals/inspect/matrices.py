"""The learnt matrices of a model's mechanisms, as JSON."""

import sys
from collections.abc import Iterator
from typing import Any

import torch

from crosshead.modeling.mechanisms.base import Mechanism
from crosshead.modeling.mechanisms.differential import Differential
from crosshead.modeling.mechanisms.talking import STAGES, Talking

from .pack import pack_numbers

LONGEST_SIDE = 256
"""Rows or columns: of a longer side, neighbours are drawn as one."""


def matrix_records(layer: int, mechanism: str, mixer: Mechanism) -> Iterator[dict[str, Any]]:
    """Each matrix of a mechanism in one layer; of one near the identity, the difference."""
    for name, matrix in learnt_matrices(mixer).items():
        matrix = matrix.float()
        identity = near_identity(matrix)
        drawn = matrix - torch.eye(len(matrix)) if identity else joined(matrix)
        yield {
            "layer": layer,
            "mechanism": mechanism,
            "name": name,
            "shape": list(matrix.shape),
            "plus_identity": identity,
            "values": pack_numbers(drawn),
        }


def learnt_matrices(mixer: Mechanism) -> dict[str, torch.Tensor]:
    """Its matrices, with rows for outputs; of talking also the map across heads without the softmax in between."""
    if isinstance(mixer, Differential):
        return {"lambda": mixer().detach().reshape(1, 1)}
    found = {name: parameter.detach() for name, parameter in mixer.named_parameters() if parameter.ndim == 2}
    matrices = {name.removesuffix(".weight"): matrix for name, matrix in found.items()}
    if isinstance(mixer, Talking) and set(mixer.settings["on"]) == set(STAGES):
        matrices["weights x logits"] = matrices["weights"] @ matrices["logits"]
    return matrices


def near_identity(matrix: torch.Tensor) -> bool:
    """Whether a square matrix is nearer to the identity than to zero: what it adds to that is then the news."""
    if matrix.shape[0] != matrix.shape[1] or not 1 < len(matrix) <= LONGEST_SIDE:
        return False
    return bool((matrix - torch.eye(len(matrix))).norm() < matrix.norm())


def joined(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix; of a side that is too long, the root mean square of neighbours."""
    blocks = [-(-size // LONGEST_SIDE) for size in matrix.shape]
    if blocks == [1, 1]:
        return matrix
    rows, columns = (size % block and block - size % block for size, block in zip(matrix.shape, blocks, strict=True))
    ones = torch.nn.functional.pad(torch.ones_like(matrix), (0, columns, 0, rows))
    squares = torch.nn.functional.pad(matrix.square(), (0, columns, 0, rows))

    def total(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (-1, blocks[1])).unflatten(0, (-1, blocks[0])).sum((1, 3))

    return (total(squares) / total(ones)).sqrt()


def description(mixer: Mechanism) -> str:
    """What the top of a mechanism's file says of it: its name and one sentence."""
    text = sys.modules[type(mixer).__module__].__doc__ or type(mixer).__name__
    return " ".join(text.partition("\n\n")[0].split())
