"""`crosshead train --dry-run`: size, FLOPs and GPU memory of a run, without loading a model or reading data."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from crosshead.common.errors import RecipeError, one_line
from crosshead.common.file_bytes import byte_size
from crosshead.evals.cost.counting import FLOPS, TRAINING_PASSES, on_meta, parameter_counts
from crosshead.evals.cost.encoder import forward_multiplications
from crosshead.evals.cost.model import model_cost

from ..schema.model_config import (
    CLASS_COUNT,
    CLASSIFIERS,
    CONFIGS,
    DECODERS,
    check_expert_bias,
    check_model_type,
    model_config,
    named_model_config,
)
from ..schema.objectives import Noise
from ..schema.recipe import Recipe
from ..trainer.loading import load_config
from ..trainer.models import TEACHER_WITH_ZERO3, check_expected
from ..trainer.objectives import objective_of
from ..trainer.parameters import is_mechanism, set_trainable
from ..trainer.training_arguments import accumulation_steps
from .memory import ALONE, FSDP, ZERO3, Sharding, Teacher, memory

CONFIG, RECIPE, SOURCE = "config.json", "model.config", "the model without mechanisms, in bfloat16"
"""Values of the report's `counted_from` and `teacher_counted_from`: the source of the model's sizes."""
LABELS = {
    "parameters": "parameters",
    "trainable_parameters": "  trainable",
    "new_parameters": "  of the mechanisms",
    "classes": "classes",
    "sequences_per_step": "sequences a step",
    "tokens_per_step": "tokens a step",
    "samples_per_step": "samples a step",
    "micro_batches_per_step": "micro batches a step, each process",
    "steps": "steps",
    "tokens": "tokens in all",
    "samples": "samples in all",
    "training_flops_per_token": "FLOPs a token, training",
    "training_flops_per_sample": "FLOPs a sample, training",
    "training_flops": "FLOPs in all",
    "kv_bytes_per_token": "KV cache, bytes a token",
}
PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "moments": "Adam's moments",
    "average": "averaged weights",
    "working_copies": "working copies of weights, estimated",
    "gradient_buckets": "gradient buckets",
    "teacher": "the teacher",
    "activations": "activations, estimated",
    "logits": "logits, estimated",
    "total": "in all",
}
FIGURE = 22


def dry_run(recipe: Recipe, sharding: Sharding) -> dict[str, Any]:
    """Return the report as a JSON object, which `dry_run_lines` formats."""
    is_noise, is_sharded = isinstance(recipe.objective, Noise), sharding.kind in (FSDP, ZERO3)
    if recipe.train.lora is not None and is_sharded:
        raise RecipeError(f"train.trainable='mixers+lora' is not possible with {sharding.kind}: use 'mixers' or 'all'")
    if recipe.train.average is not None and is_sharded:
        raise RecipeError(f"train.average={recipe.train.average:g} is not possible with {sharding.kind}: leave it out")
    if is_noise and is_sharded:
        raise RecipeError(f"the objective {recipe.objective.name} is not possible with {sharding.kind}")
    config, counted_from = _config(recipe)
    check_expert_bias(config, recipe.train.expert_bias_rate)
    if not is_noise:
        config.dtype = getattr(torch, recipe.train.dtype)
    with _counting(config, RECIPE if counted_from == RECIPE else f"model.path={recipe.model.path}"):
        model = _new_diffusion_model(recipe, config) if is_noise else on_meta(config)
        counts = _counts(recipe, config, model)
        model = set_trainable(model, recipe.train)
        trained = {name: part.numel() for name, part in model.named_parameters() if part.requires_grad}
        teacher, teacher_from = _teacher(recipe, config, sharding.kind)
        memory_per_gpu = memory(recipe, config, model, sharding, teacher)
    return {
        "model": recipe.model.path,
        "counted_from": counted_from,
        "convert": recipe.model.convert if counted_from == RECIPE else None,
        "teacher_counted_from": teacher_from,
        "trainable_parameters": sum(trained.values()),
        **counts,
        "sequences_per_step": recipe.batch_size,
        f"{recipe.objective.unit}_per_step": recipe.per_step,
        "micro_batches_per_step": accumulation_steps(recipe, sharding.processes),
        "steps": recipe.steps,
        recipe.objective.unit: recipe.steps * recipe.per_step,
        "objective": recipe.objective.name,
        "optimizer": _optimizer(recipe, trained),
        "dtype": recipe.train.dtype,
        "checkpoint_activations": recipe.train.checkpoint_activations,
        "accelerate": sharding.name,
        "sharding": sharding.kind,
        "processes": sharding.processes,
        "memory_per_gpu": memory_per_gpu,
    }


def _new_diffusion_model(recipe: Recipe, config: Any) -> Any:
    """Return the diffusion transformer of a configuration on the meta device."""
    with torch.device("meta"), named_model_config():
        return objective_of(recipe).new_model(config)


def _counts(recipe: Recipe, config: Any, model: Any) -> dict[str, int]:
    """Return parameters, FLOPs and, for a decoder, KV-cache bytes per token, for a classifier, its classes."""
    unit, amount = recipe.objective.unit.removesuffix("s"), recipe.steps * recipe.per_step
    if recipe.objective.auto_class == DECODERS:
        cost = model_cost(config, recipe.data.length)
        flops, counts = cost.training_flops, {"kv_bytes_per_token": cost.kv_bytes_per_token}
        counts |= {"parameters": cost.parameters, "new_parameters": cost.new_parameters}
    else:
        inputs = {name: _on_meta(part, model.dtype) for name, part in objective_of(recipe).example(config, 1).items()}
        flops = TRAINING_PASSES * FLOPS * forward_multiplications(model, **inputs)
        flops //= recipe.data.length if recipe.counts_tokens else 1
        counted = parameter_counts(model)
        counts = {"classes": config.num_labels} if recipe.objective.auto_class == CLASSIFIERS else {}
        counts |= {key: counted[key] for key in ("parameters", "new_parameters")}
    return counts | {f"training_flops_per_{unit}": flops, "training_flops": flops * amount}


def _on_meta(value: Any, dtype: torch.dtype) -> Any:
    """Return a tensor on the meta device, with `dtype` if it has floating-point numbers; other values unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.to("meta", dtype if value.is_floating_point() else value.dtype)


def _optimizer(recipe: Recipe, sizes: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """Return parameter count, peak learning rate and weight decay of the stock model and of the mechanisms."""
    train = recipe.train
    mechanisms = sum(size for name, size in sizes.items() if is_mechanism(name))
    settings = {
        "model": (sum(sizes.values()) - mechanisms, train.learning_rate, train.weight_decay),
        "mechanisms": (mechanisms, train.mechanism_rate, train.mechanisms.weight_decay),
    }
    keys = ("parameters", "learning_rate", "weight_decay")
    return {part: dict(zip(keys, values, strict=True)) for part, values in settings.items() if values[0]}


def _config(recipe: Recipe) -> tuple[Any, str]:
    """Return the configuration of the model to train, and its source (`CONFIG` or `RECIPE`)."""
    path, expected = recipe.model.path, recipe.model.config
    is_replaced = getattr(recipe.objective, "new_classifier", False)
    if expected is not None and (path is None or not Path(path).exists()):
        config, source = model_config(expected, recipe.objective), RECIPE
    else:
        config, source = load_config(str(path), "model.path"), CONFIG
        check_model_type(config.model_type, recipe.objective)
        if expected is not None:
            expected_config = model_config(expected, recipe.objective)
            if is_replaced:
                config.num_labels = expected_config.num_labels
            check_expected(config, expected_config, expected)
        config_class = CONFIGS.get(f"crosshead_{config.model_type}")
        if config_class is not None and DECODERS not in config_class.auto_classes:
            # Count a stock model as a crosshead model without mechanisms.
            config = config_class.from_dict(config.to_dict())
    is_new = recipe.objective.auto_class == CLASSIFIERS and (source == RECIPE or is_replaced)
    if is_new and CLASS_COUNT not in (expected or {}):
        config.num_labels = len(_class_folders(recipe)) or config.num_labels
    if hasattr(config, "auto_classes"):
        config.architectures = [f"{config.class_prefix}{config.auto_classes[recipe.objective.auto_class]}"]
    return config, source


def _class_folders(recipe: Recipe) -> set[str]:
    """Return the class names of the image folders in the recipe; empty if the folders are not on this machine."""
    folders = [Path(source.path) for source in recipe.data.sources if source.kind == "images"]
    paths = [path for folder in folders if folder.is_dir() for path in folder.iterdir()]
    return {path.name for path in paths if path.is_dir() and not path.name.startswith(".")}


def _teacher(recipe: Recipe, config: Any, kind: str) -> tuple[Teacher | None, str | None]:
    """Return the teacher's sizes and the source of its configuration; None for both without a teacher."""
    name = recipe.distillation.teacher if recipe.distillation else None
    if name is None:
        return None, None
    if kind == ZERO3:
        raise RecipeError(TEACHER_WITH_ZERO3)
    if Path(name).exists():
        teacher_config, source = load_config(name, "distillation.teacher"), CONFIG
    else:
        teacher_config, source = deepcopy(config), SOURCE
        teacher_config.mixers, teacher_config.dtype = {}, torch.bfloat16
    dtype = teacher_config.dtype or torch.get_default_dtype()
    with _counting(teacher_config, f"distillation.teacher={name}"):
        return Teacher(on_meta(teacher_config).num_parameters(), teacher_config.vocab_size, dtype.itemsize), source


@contextmanager
def _counting(config: Any, name: str) -> Iterator[None]:
    """Convert errors while a model is built or run on the meta device to a `RecipeError`."""
    try:
        yield
    except (RecipeError, ImportError):
        raise
    except Exception as error:  # unsupported families have modules of other names or types
        if f"crosshead_{config.model_type.removeprefix('crosshead_')}" in CONFIGS:
            raise RecipeError(f"{name}: {one_line(error)}") from error
        raise RecipeError(
            f"{name}: a model of model_type={config.model_type!r} cannot be counted, because crosshead has no class "
            "for it: train it without --dry-run"
        ) from error


def dry_run_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Format the report as a table, followed by notes."""
    if report["counted_from"] == RECIPE and report["model"] is not None:
        yield f"{report['model']} does not exist: counted from model.config"
        if report["convert"]:
            yield "make it with"
            yield from (f"  {line}" for line in report["convert"].strip().splitlines())
    label = max(map(len, (*LABELS.values(), *PARTS.values()))) + 2
    for key, text in LABELS.items():
        if key in report:
            yield f"{text.ljust(label)}{_count(report[key]):>{FIGURE}}"
    shared = "" if report["sharding"] == ALONE else f", {report['processes']} GPUs"
    yield f"memory of a GPU: {report['accelerate']} ({report['sharding']}{shared})"
    for key, text in PARTS.items():
        size = report["memory_per_gpu"][key]
        if size:
            yield f"{'  ' + text:{label}}{byte_size(size):>{FIGURE}}"
    yield from _notes(report)


def _count(number: int) -> str:
    return f"{number:,}" if number < 10**15 else f"{number:.4g}"


def _notes(report: Mapping[str, Any]) -> Iterator[str]:
    if report["teacher_counted_from"] == SOURCE:
        yield f"The teacher is not on this disk. It is counted as {SOURCE}."
    for part, settings in report["optimizer"].items():
        rate, decay = (f"{settings[key]:g}" for key in ("learning_rate", "weight_decay"))
        yield f"AdamW trains the {part} with a learning rate of at most {rate} and a weight decay of {decay}."
    omitted = ["the recomputation of layers, a third more"] if report["checkpoint_activations"] else []
    omitted += ["the teacher's work"] if report["teacher_counted_from"] else []
    if report["trainable_parameters"] < report["parameters"]:
        yield "FLOPs include the gradients of frozen weights, which are not computed."
    if omitted:
        yield f"FLOPs leave out {' and '.join(omitted)}."
    if "kv_bytes_per_token" in report:
        yield f"The KV cache is that of the trained model in {report['dtype']}."
    if not report["memory_per_gpu"]["activations"]:
        yield "Activations, the autoencoder, CUDA itself, fragmentation and temporary memory are not included."
        return
    yield "Activations are measured on small copies of the model on the CPU; a GPU's kernels save similar sizes."
    yield "CUDA itself, fragmentation and temporary memory are not included."
