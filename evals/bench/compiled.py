"""Training steps of models that `torch.compile` has compiled whole, beside stock ones that it has compiled as well.

A compiled model takes the ways that fit into one graph: `mixture` computes every head, but on a GPU with its kernel.
"""

import os
import sys
from shutil import which
from typing import Any

import torch

from crosshead.common.errors import EvalError

from .case import Case
from .models import MIXERS, PAPERS_LINEAR, SHAPE, training_step
from .pairs import Run

BACKEND = "inductor"
STOCK = "stock Llama of the same shape, sdpa, compiled as well"


def check_compiler() -> None:
    """`EvalError` where torch would not find the compiler of the code that it writes."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if which(compiler) is None:
        raise EvalError(f"torch.compile needs {compiler}, which is not there: install it, or name another in CXX")


def compiled_step(ours: bool, tokens: int, **shape: Any) -> Run:
    """A training step in one graph, without a break; it is compiled when it first runs."""
    torch.compiler.reset()  # what other cases have compiled counts against how often a function may be
    return training_step(
        ours, tokens, lambda trained: torch.compile(trained, fullgraph=True, backend=BACKEND), **shape
    )


def _case(name: str, mixers: dict[str, Any]) -> Case:
    what = f"compiled training step of a model with {name.replace('-', ' ')}, 2048 tokens"
    return Case(f"{name}-step", what, STOCK, compiled_step, SHAPE | {"tokens": 2048, "mixers": mixers})


CASES = tuple(_case(name, mixers) for name, mixers in (MIXERS | {"knocking-linear": PAPERS_LINEAR}).items())
