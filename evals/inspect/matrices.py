"""Reports the learnt matrices of a model's mechanisms as JSON."""

import sys
from collections.abc import Iterator, Sequence
from math import ceil
from typing import Any

import torch
from torch.nn.functional import avg_pool2d

from crosshead.modeling.mechanisms.base import Mechanism
from crosshead.modeling.mechanisms.differential import Differential
from crosshead.modeling.mechanisms.explicit import Explicit
from crosshead.modeling.mechanisms.talking import STAGES, Talking

from .pack import pack_numbers

MAXIMUM_SIDE = 256
"""Maximum number of rows or columns; larger matrices are downsampled."""


def matrix_records(part: str, layers: Sequence[int], name: str, mechanism: Mechanism) -> Iterator[dict[str, Any]]:
    """Yield the record of each matrix of a mechanism, which layers may share.

    A matrix near the identity is stored as its difference from the identity.
    """
    for matrix_name, matrix in learnt_matrices(mechanism).items():
        matrix = matrix.float()
        identity = near_identity(matrix)
        yield {
            "part": part,
            "layers": list(layers),
            "mechanism": name,
            "name": matrix_name,
            "shape": list(matrix.shape),
            "plus_identity": identity,
            "values": pack_numbers(matrix - torch.eye(len(matrix)) if identity else downsample(matrix)),
        }


def learnt_matrices(mechanism: Mechanism) -> dict[str, torch.Tensor]:
    """Return the matrices of a mechanism, with a row for each output.

    For talking, the product of its two maps is added, as if there were no softmax between them. The matrices of
    explicit are block-diagonal, with a block for each group.
    """
    if isinstance(mechanism, Differential) and mechanism.version == 1:
        return {"lambda": mechanism(mechanism.lambda_q1).detach().reshape(1, 1)}
    parameters = {name.removesuffix(".weight"): parameter.detach() for name, parameter in mechanism.named_parameters()}
    matrices = {name: matrix for name, matrix in parameters.items() if matrix.ndim == 2}
    if isinstance(mechanism, Explicit):
        groups = mechanism.settings["groups"]
        matrices = {name: torch.block_diag(*matrix.chunk(groups)) for name, matrix in matrices.items()}
    if isinstance(mechanism, Talking) and set(mechanism.settings["on"]) == set(STAGES):
        matrices["weights x logits"] = matrices["weights"] @ matrices["logits"]
    return matrices


def near_identity(matrix: torch.Tensor) -> bool:
    """True if a square matrix is nearer to the identity than to zero."""
    if matrix.shape[0] != matrix.shape[1] or not 1 < len(matrix) <= MAXIMUM_SIDE:
        return False
    return bool((matrix - torch.eye(len(matrix))).norm() < matrix.norm())


def downsample(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix; if a side is too long, the root mean square of blocks."""
    block = tuple(ceil(size / MAXIMUM_SIDE) for size in matrix.shape)
    return matrix if block == (1, 1) else avg_pool2d(matrix.square()[None], block, ceil_mode=True)[0].sqrt()


def description(mechanism: Mechanism) -> str:
    """Return the first paragraph of the module docstring of the mechanism's file."""
    text = sys.modules[type(mechanism).__module__].__doc__ or type(mechanism).__name__
    return " ".join(text.partition("\n\n")[0].split())
