"""What each GPU holds while a recipe trains, in bytes.

Exact: weights, gradients and Adam's two moments, float32, of which a shard holds its part. Under DeepSpeed with
bfloat16, gradients and a second set of weights are bfloat16.

Estimates:
- copies of weights at work. In bfloat16 and without shards, one of every matrix but the experts'. With FSDP2, what is
  gathered at a time: the head and its gradient, two layers, the gradient of one. With DeepSpeed, what its defaults let
  live at a time, and its bucket of gradients.
- with a copy on each GPU, the buckets in which gradients are sent.
- activations, which `activations.py` measures on small copies.
- logits of a micro batch: as they are made, in float32, and their logarithms; a teacher's, and copies to compare.

Not counted: CUDA itself, fragments, and what a kernel or the backward pass of one layer needs for a moment.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

import torch
from torch import nn

from crosshead.evals.cost.model import on_meta

from ..schema.recipe import Recipe
from ..trainer.trainable import set_trainable
from .activations import Arithmetic, activations, decoder_layers
from .sharding import COPIES, FSDP, ZERO3, Sharding

WIDE, MOMENTS = torch.float32.itemsize, 2
LIVE, BUCKET = 1_000_000_000, 500_000_000
"""Numbers: DeepSpeed's defaults of stage3_max_live_parameters and reduce_bucket_size."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU."""

    weights: int
    gradients: int
    moments: int
    working_copies: int
    gradient_buckets: int
    teacher: int
    activations: int
    logits: int

    def as_dict(self) -> dict[str, int]:
        """With the sum, as `total`."""
        parts = asdict(self)
        return parts | {"total": sum(parts.values())}


@dataclass(frozen=True)
class Teacher:
    """The model that is learnt from; every GPU holds it whole."""

    parameters: int
    vocabulary: int
    itemsize: int


def memory(recipe: Recipe, config: Any, sharding: Sharding, teacher: Teacher | None) -> Memory:
    """Of a model of this configuration, trained as the recipe says."""
    model = set_trainable(on_meta(config), recipe.train)
    held = _shard(model.parameters(), sharding)
    moved = _shard((tensor for tensor in model.parameters() if tensor.requires_grad), sharding)
    work = _itemsize(recipe)
    second = held * work if sharding.kind == ZERO3 and work < WIDE else 0
    found = activations(config, recipe.train, recipe.data, arithmetic(recipe, sharding))
    return Memory(
        weights=(moved if second else held) * WIDE + second,
        gradients=moved * (work if sharding.kind == ZERO3 else WIDE),
        moments=moved * WIDE * MOMENTS,
        working_copies=_working_copies(model, sharding, work),
        gradient_buckets=_numbers(model, moving=True) * WIDE if sharding.kind == COPIES else 0,
        teacher=teacher.parameters * teacher.itemsize if teacher else 0,
        activations=found.kept(recipe.train.checkpoint_activations),
        logits=_logits(recipe, config.vocab_size, teacher),
    )


def arithmetic(recipe: Recipe, sharding: Sharding) -> Arithmetic:
    """How accelerate has a recipe compute."""
    if recipe.train.dtype == "float32":
        return Arithmetic(torch.float32, autocast=False)
    sharded = sharding.kind in (FSDP, ZERO3)
    return Arithmetic(torch.bfloat16 if sharded else torch.float32, autocast=sharding.kind != ZERO3)


def _itemsize(recipe: Recipe) -> int:
    return int(getattr(torch, recipe.train.dtype).itemsize)


def _shard(parameters: Iterable[nn.Parameter], sharding: Sharding) -> int:
    """How many numbers of the parameters one process stores: FSDP2 cuts each along its first dimension."""
    if sharding.kind == FSDP:
        return sum(ceil(part.shape[0] / sharding.processes) * part.shape[1:].numel() for part in parameters)
    count = sum(part.numel() for part in parameters)
    return ceil(count / sharding.processes) if sharding.kind == ZERO3 else count


def _working_copies(model: nn.Module, sharding: Sharding, work: int) -> int:
    if sharding.kind == ZERO3:
        return (min(_numbers(model), LIVE) + min(_numbers(model, moving=True), BUCKET)) * work
    if sharding.kind == FSDP:
        head, layer = _units(model)
        return (2 * head + 3 * layer) * work
    return _matrices(model) * work if work < WIDE else 0


def _numbers(model: nn.Module, moving: bool = False) -> int:
    return sum(part.numel() for part in model.parameters() if part.requires_grad or not moving)


def _matrices(model: Any) -> int:
    """Numbers that autocast copies: the library's experts are three-dimensional, and it leaves them as they are."""
    embedding = model.get_input_embeddings().weight
    tied = embedding is model.get_output_embeddings().weight
    return sum(part.numel() for part in model.parameters() if part.ndim == 2 and (tied or part is not embedding))


def _units(model: Any) -> tuple[int, int]:
    """Of what FSDP2 gathers at once, the head and the largest layer."""
    return _numbers(model.get_output_embeddings()), max(map(_numbers, decoder_layers(model)))


def _logits(recipe: Recipe, vocabulary: int, teacher: Teacher | None) -> int:
    rows = recipe.train.micro_batch * recipe.data.length
    made = _itemsize(recipe) if recipe.train.dtype != "float32" else 0  # or float32 already
    own = rows * vocabulary * (made + 2 * WIDE)
    if recipe.distillation is None:
        return own
    compared = rows * vocabulary * WIDE
    if teacher is None:
        return own + compared
    return own + compared + 2 * rows * teacher.vocabulary * min(teacher.itemsize, _itemsize(recipe))
