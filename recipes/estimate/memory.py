"""Estimate of the memory per GPU during training, in bytes, for a configuration of `accelerate launch --config_file`.

Exact: weights, gradients, Adam's two moments and averaged weights in float32, divided among the GPUs if sharded.
DeepSpeed with bfloat16 has its gradients and a second set of weights in bfloat16.

Estimates:
- working copies of weights. With bfloat16 autocast and no sharding: a copy of every matrix, without those of experts.
  With FSDP2: the tensors that are gathered at the same time, which are the head and its gradient, two layers and the
  gradient of one layer. With DeepSpeed: the default maximum of live parameters, and the gradient bucket.
- with data parallelism: the buckets in which gradients are reduced.
- activations, measured by `activations.py` on small copies of the model; not for diffusion models.
- the logits of a micro batch: in the compute dtype (if not float32), in float32, and their log-probabilities; in a
  distillation one more float32 copy and, if the teacher runs, two copies of its logits.

Not counted: the CUDA context, fragmentation, and temporary memory of kernels and of the backward pass of one layer.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from crosshead.common.errors import RecipeError, one_line
from crosshead.modeling.options import is_whole

from ..schema.objectives import Noise
from ..schema.recipe import Recipe
from ..trainer.objectives import objective_of
from .activations import Precision, activations, model_layers

FOLDER = Path(__file__).parents[1] / "accelerate"
"""Folder of the accelerate configurations that are shipped with the package."""
ALONE, COPIES, FSDP, ZERO3 = "one GPU", "a copy on each GPU", "FSDP2", "DeepSpeed ZeRO-3"
KINDS = {"NO": ALONE, "MULTI_GPU": COPIES, "FSDP": FSDP, "DEEPSPEED": ZERO3}
"""accelerate's `distributed_type` -> sharding kind."""
SUPPORTED: dict[str, dict[str, tuple[Any, Any]]] = {
    FSDP: {
        "fsdp_config.fsdp_version": (2, 1),
        "fsdp_config.fsdp_reshard_after_forward": (True, True),
        "fsdp_config.fsdp_offload_params": (False, False),
    },
    ZERO3: {
        "deepspeed_config.zero_stage": (3, 2),
        "deepspeed_config.offload_optimizer_device": ("none", "none"),
        "deepspeed_config.offload_param_device": ("none", "none"),
        "deepspeed_config.deepspeed_config_file": (None, None),
    },
}
"""Sharding kind -> key of the configuration file -> the only supported value, and accelerate's default."""
FLOAT32, MOMENTS = torch.float32.itemsize, 2
LIVE, BUCKET = 1_000_000_000, 500_000_000
"""DeepSpeed's defaults of stage3_max_live_parameters and reduce_bucket_size, in elements."""


@dataclass(frozen=True)
class Sharding:
    """Distribution of a model over GPUs."""

    name: str
    """Name of the accelerate configuration."""
    kind: str
    """One of `ALONE`, `COPIES`, `FSDP` and `ZERO3`."""
    processes: int
    """Number of processes, one per GPU."""


ONE_GPU = Sharding("one_gpu", ALONE, 1)


@dataclass(frozen=True)
class Teacher:
    """Sizes of the distillation teacher, which is replicated on every GPU."""

    parameters: int
    vocabulary: int
    itemsize: int


def read_sharding(name: str) -> Sharding:
    """Read an accelerate configuration file, given by its path or, if shipped, by a name such as `fsdp2_8_gpus`."""
    shipped = FOLDER / f"{name.removesuffix('.yaml')}.yaml"
    path = shipped if shipped.is_file() and not Path(name).exists() else Path(name)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        known = ", ".join(sorted(file.stem for file in FOLDER.glob("*.yaml")))
        raise RecipeError(f"--accelerate {name} cannot be read: {one_line(error)}; shipped are {known}") from None
    if not isinstance(content, dict):
        raise RecipeError(f"--accelerate {name} is not a configuration of accelerate: make one by `accelerate config`")
    kind = KINDS.get(str(content.get("distributed_type")))
    if kind is None:
        raise RecipeError(
            f"--accelerate {name}: distributed_type={content.get('distributed_type')!r} is not supported: "
            f"use one of {', '.join(KINDS)}"
        )
    for name_in_file, (supported, default) in SUPPORTED.get(kind, {}).items():
        section, key = name_in_file.split(".")
        options = content.get(section) or {}
        if not isinstance(options, dict):
            raise RecipeError(f"--accelerate {name}: {section}={options!r} is not a mapping, one `key: value` a line")
        if options.get(key, default) != supported:
            raise RecipeError(
                f"--accelerate {name}: {name_in_file}={options.get(key, default)!r} is not supported by --dry-run, "
                f"only {supported!r}: use that, or start the run itself"
            )
    processes: Any = 1 if kind == ALONE else content.get("num_processes")
    if not is_whole(processes) or processes < 1:
        raise RecipeError(f"--accelerate {name}: num_processes={processes!r} is not a number of GPUs")
    return Sharding(path.stem, kind, processes)


def memory(recipe: Recipe, config: Any, model: Any, sharding: Sharding, teacher: Teacher | None) -> dict[str, int]:
    """Estimate the bytes per GPU, by purpose and in `total`, for a model with this configuration.

    `model` is the model on the meta device, prepared for training by the recipe.
    """
    stored = _shard(model.parameters(), sharding)
    trained = _shard((tensor for tensor in model.parameters() if tensor.requires_grad), sharding)
    itemsize = _itemsize(recipe)
    bfloat16_copy = stored * itemsize if sharding.kind == ZERO3 and itemsize < FLOAT32 else 0
    saved = 0  # activations of diffusion models are not estimated
    if not isinstance(recipe.objective, Noise):
        saved = activations(config, recipe, precision(recipe, sharding)).total(recipe.train.checkpoint_activations)
    parts = {
        "weights": (trained if bfloat16_copy else stored) * FLOAT32 + bfloat16_copy,
        "gradients": trained * (itemsize if sharding.kind == ZERO3 else FLOAT32),
        "moments": trained * FLOAT32 * MOMENTS,
        "average": trained * FLOAT32 if recipe.train.average else 0,
        "working_copies": _working_copies(model, sharding, itemsize),
        "gradient_buckets": _elements(model, trained=True) * FLOAT32 if sharding.kind == COPIES else 0,
        "teacher": teacher.parameters * teacher.itemsize if teacher else 0,
        "activations": saved,
        "logits": _logits(recipe, objective_of(recipe).logits(config), teacher),
    }
    return parts | {"total": sum(parts.values())}


def precision(recipe: Recipe, sharding: Sharding) -> Precision:
    """Return the dtypes with which accelerate runs the recipe."""
    if recipe.train.dtype == "float32":
        return Precision(torch.float32, autocast=False)
    is_sharded = sharding.kind in (FSDP, ZERO3)
    return Precision(torch.bfloat16 if is_sharded else torch.float32, autocast=sharding.kind != ZERO3)


def _itemsize(recipe: Recipe) -> int:
    return int(getattr(torch, recipe.train.dtype).itemsize)


def _shard(parameters: Iterable[nn.Parameter], sharding: Sharding) -> int:
    """Return the number of elements that one process stores; FSDP2 shards each parameter along dimension 0."""
    if sharding.kind == FSDP:
        return sum(ceil(part.shape[0] / sharding.processes) * part.shape[1:].numel() for part in parameters)
    count = sum(part.numel() for part in parameters)
    return ceil(count / sharding.processes) if sharding.kind == ZERO3 else count


def _working_copies(model: Any, sharding: Sharding, itemsize: int) -> int:
    if sharding.kind == ZERO3:
        return (min(_elements(model), LIVE) + min(_elements(model, trained=True), BUCKET)) * itemsize
    if sharding.kind == FSDP:
        head, layer = _elements(_head(model)), max(map(_elements, model_layers(model)))
        return (2 * head + 3 * layer) * itemsize
    return _matrix_elements(model) * itemsize if itemsize < FLOAT32 else 0


def _head(model: Any) -> nn.Module:
    """Return the output layer, which computes the logits."""
    head: nn.Module | None = model.get_output_embeddings()
    return list(model.children())[-1] if head is None else head  # an image classifier has no output embeddings


def _elements(model: nn.Module, trained: bool = False) -> int:
    return sum(part.numel() for part in model.parameters() if part.requires_grad or not trained)


def _matrix_elements(model: Any) -> int:
    """Return the number of elements that autocast copies: not experts (3-D tensors), nor an untied embedding."""
    if hasattr(model.config, "image_size"):  # convolutions and matrices
        return sum(part.numel() for part in model.parameters() if part.ndim in (2, 4))
    matrices = [part for part in model.parameters() if part.ndim == 2]
    if hasattr(model, "get_input_embeddings"):  # not a diffusion model
        embedding = model.get_input_embeddings().weight
        if embedding is not model.get_output_embeddings().weight:
            matrices = [part for part in matrices if part is not embedding]
    return sum(part.numel() for part in matrices)


def _logits(recipe: Recipe, logits: int, teacher: Teacher | None) -> int:
    """Return the bytes of a micro batch's logits; `logits` is the number of logits of one sample."""
    rows = recipe.train.micro_batch * recipe.data.length
    in_bfloat16 = _itemsize(recipe) if recipe.train.dtype != "float32" else 0
    size = recipe.train.micro_batch * logits * (in_bfloat16 + 2 * FLOAT32)
    if recipe.distillation is not None:
        size += recipe.train.micro_batch * logits * FLOAT32
    if teacher is not None:
        size += 2 * rows * teacher.vocabulary * min(teacher.itemsize, _itemsize(recipe))
    return size
