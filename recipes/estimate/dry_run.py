"""The size, work and memory of a run, without loading a model or reading a text."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from crosshead.common.errors import RecipeError, one_line
from crosshead.evals.cost.model import model_cost, on_meta

from ..schema.model_config import CONFIGS, check_expert_bias, model_config
from ..schema.recipe import Recipe
from ..trainer.models import check_expected
from ..trainer.trainable import is_new, set_trainable
from ..trainer.training_arguments import accumulation
from .memory import Teacher, memory
from .sharding import ALONE, FSDP, ZERO3, Sharding, check_teacher

CONFIG, RECIPE, SOURCE = "config.json", "model.config", "the model without mechanisms, in bfloat16"
"""Where sizes may come from."""
LABELS = {
    "parameters": "parameters",
    "trainable_parameters": "  trainable",
    "new_parameters": "  of the mechanisms",
    "sequences_per_step": "sequences a step",
    "tokens_per_step": "tokens a step",
    "micro_batches_per_step": "micro batches a step, each process",
    "steps": "steps",
    "tokens": "tokens in all",
    "training_flops_per_token": "FLOPs a token, training",
    "training_flops": "FLOPs in all",
    "kv_bytes_per_token": "KV cache, bytes a token",
}
PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "moments": "Adam's moments",
    "working_copies": "copies of weights at work, estimated",
    "gradient_buckets": "buckets to send gradients in",
    "teacher": "the teacher",
    "activations": "activations, estimated",
    "logits": "logits, estimated",
    "total": "in all",
}
UNITS = ("bytes", "KiB", "MiB", "GiB")
FIGURE = 22


def dry_run(recipe: Recipe, sharding: Sharding) -> dict[str, Any]:
    """The figures, for scripts and for `dry_run_lines`."""
    if recipe.train.lora is not None and sharding.kind in (FSDP, ZERO3):
        raise RecipeError(f"train.trainable='mixers+lora' is not for {sharding.kind}: use 'mixers' or 'all'")
    config, counted_from = _model(recipe)
    check_expert_bias(config, recipe.train.expert_bias_rate)
    config.dtype = getattr(torch, recipe.train.dtype)
    with _counting(config, RECIPE if counted_from == RECIPE else f"model.path={recipe.model.path}"):
        cost = model_cost(config, recipe.data.length)
        trained = set_trainable(on_meta(config), recipe.train).named_parameters()
        moving = {name: part.numel() for name, part in trained if part.requires_grad}
        teacher, teacher_from = _teacher(recipe, config, sharding.kind)
        held = memory(recipe, config, sharding, teacher)
    steps, tokens = recipe.steps, recipe.steps * recipe.train.batch_tokens
    return {
        "model": recipe.model.path,
        "counted_from": counted_from,
        "convert": recipe.model.convert if counted_from == RECIPE else None,
        "teacher_counted_from": teacher_from,
        "parameters": cost.parameters,
        "trainable_parameters": sum(moving.values()),
        "new_parameters": cost.new_parameters,
        "sequences_per_step": recipe.batch_size,
        "tokens_per_step": recipe.train.batch_tokens,
        "micro_batches_per_step": accumulation(recipe, sharding.processes),
        "steps": steps,
        "tokens": tokens,
        "training_flops_per_token": cost.training_flops,
        "training_flops": cost.training_flops * tokens,
        "kv_bytes_per_token": cost.kv_bytes_per_token,
        "optimizer": _optimizer(recipe, moving),
        "dtype": recipe.train.dtype,
        "checkpoint_activations": recipe.train.checkpoint_activations,
        "accelerate": sharding.name,
        "sharding": sharding.kind,
        "processes": sharding.processes,
        "memory_per_gpu": held.as_dict(),
    }


def _optimizer(recipe: Recipe, moving: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """By what is trained, the highest learning rate, the weight decay, and how many parameters these are for."""
    train = recipe.train
    settings = {
        "model": (train.learning_rate, train.weight_decay),
        "mechanisms": (train.mechanism_rate, train.mechanisms.weight_decay),
    }
    sizes = {"model": 0, "mechanisms": 0}
    for name, size in moving.items():
        sizes["mechanisms" if is_new(name) else "model"] += size
    return {
        part: {"parameters": sizes[part], "learning_rate": rate, "weight_decay": decay}
        for part, (rate, decay) in settings.items()
        if sizes[part]
    }


def _model(recipe: Recipe) -> tuple[Any, str]:
    """The configuration to train, and where it was found."""
    path, expected = recipe.model.path, recipe.model.config
    if expected is not None and (path is None or not Path(path).exists()):
        return model_config(expected), RECIPE
    found = _stored(str(path), "model.path")
    if expected is not None:
        check_expected(found, model_config(expected))
    return found, CONFIG


def _teacher(recipe: Recipe, config: Any, kind: str) -> tuple[Teacher | None, str | None]:
    """The model to learn from, by its own configuration where that is on this disk."""
    name = recipe.distillation.teacher if recipe.distillation else None
    if name is None:
        return None, None
    check_teacher(kind)
    if Path(name).exists():
        found, where = _stored(name, "distillation.teacher"), CONFIG
    else:
        found, where = deepcopy(config), SOURCE
        found.mixers, found.dtype = {}, torch.bfloat16
    dtype = found.dtype or torch.get_default_dtype()
    with _counting(found, f"distillation.teacher={name}"):
        return Teacher(on_meta(found).num_parameters(), found.vocab_size, dtype.itemsize), where


@contextmanager
def _counting(config: Any, name: str) -> Iterator[None]:
    """`RecipeError` where no model can be made of a configuration, or only one that is put together in other ways."""
    try:
        yield
    except (RecipeError, ImportError):  # what is missing is told as everywhere
        raise
    except Exception as error:  # modules are not found, or not what they are elsewhere
        if f"crosshead_{config.model_type.removeprefix('crosshead_')}" in CONFIGS:
            raise RecipeError(f"{name}: {one_line(error)}") from error
        raise RecipeError(
            f"{name}: a model of model_type={config.model_type!r} cannot be counted, only one of a Llama or Qwen "
            "family: train it without --dry-run"
        ) from error


def _stored(path: str, key: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # whatever its reader stumbles over
        raise RecipeError(f"{key}={path} has no configuration that can be read: {one_line(error)}") from None


def dry_run_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The report as a table, and what must be known to read it."""
    if report["counted_from"] == RECIPE and report["model"] is not None:
        yield f"{report['model']} is not there: counted from model.config"
        if report["convert"]:
            yield "it is made with"
            yield from (f"  {line}" for line in report["convert"].strip().splitlines())
    label = max(map(len, (*LABELS.values(), *PARTS.values()))) + 2
    for key, text in LABELS.items():
        yield f"{text.ljust(label)}{_count(report[key]):>{FIGURE}}"
    shared = "" if report["sharding"] == ALONE else f", {report['processes']} GPUs"
    yield f"memory of a GPU: {report['accelerate']} ({report['sharding']}{shared})"
    for key, text in PARTS.items():
        size = report["memory_per_gpu"][key]
        if size:
            yield f"{'  ' + text:{label}}{_bytes(size):>{FIGURE}}"
    yield from _notes(report)


def _count(number: int) -> str:
    return f"{number:,}" if number < 10**15 else f"{number:.4g}"


def _bytes(size: int) -> str:
    """In the largest unit of which there is one."""
    power = min(3, max(0, size.bit_length() - 1) // 10)
    return f"{size / 1024**power:,.2f} {UNITS[power]}"


def _notes(report: Mapping[str, Any]) -> Iterator[str]:
    if report["teacher_counted_from"] == SOURCE:
        yield f"The teacher is not on this disk: counted as {SOURCE}."
    for part, settings in report["optimizer"].items():
        rate, decay = (f"{settings[key]:g}" for key in ("learning_rate", "weight_decay"))
        yield f"AdamW trains the {part} with a learning rate of at most {rate} and a weight decay of {decay}."
    more = ["computing layers again, a third more"] if report["checkpoint_activations"] else []
    more += ["the teacher's work"] if report["teacher_counted_from"] else []
    if more:
        yield f"FLOPs leave out {' and '.join(more)}."
    yield f"The KV cache is that of the trained model in {report['dtype']}."
    yield "Activations are measured on small copies of the model on the CPU; a GPU's kernels keep much the same."
    yield "CUDA itself, fragments and what is needed for a moment come on top."
