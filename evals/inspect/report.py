"""Runs models on texts or images and reports the states of their layers as one JSON object, which the page shows."""

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.utils.hub import cached_file

from crosshead.common.checked_json import parse_object
from crosshead.common.errors import EvalError
from crosshead.common.model_location import split_revision
from crosshead.common.progress import Progress

from ..open_model import Opened, load_model, open_config, with_tokenizer
from .backbones import (
    BACKBONES,
    DIT,
    IMAGE,
    Backbone,
    Part,
    backbone_of,
    head_size,
    key_value_heads,
    model_class,
    query_heads,
)
from .diffusion import load_dit, open_dit, record_block
from .inputs import MAXIMUM_TOKENS, Inputs, Sample, read_samples
from .layer import TOP, LayerStates, layer_record, record_states
from .matrices import description, matrix_records
from .pack import rounded

TRAINING, DRIFT = "training.json", "drift/"
"""File name of the training record in a model's folder, and prefix of its metrics on mechanisms."""


class AttentionModule(NamedTuple):
    """An attention module, its part of the model, and the layers that use it: several layers if they share weights."""

    part: Part
    attention: Any
    layers: list[int]


def inspect_report(names: Sequence[str], inputs: Inputs, progress: Progress) -> dict[str, Any]:
    """Return the report of one or two models on texts or images."""
    read = []
    for name in names:
        opened = open_dit(name) or open_config(name)
        backbone = backbone_of(opened)
        opened = opened if IMAGE in backbone.reads else with_tokenizer(opened)
        read.append((opened, backbone, read_samples(opened, backbone, inputs)))
    models = [model_record(*each, progress) for each in read]
    return {"longest_text": MAXIMUM_TOKENS, "top": TOP, "models": models}


def model_record(opened: Opened, backbone: Backbone, samples: Sequence[Sample], progress: Progress) -> dict[str, Any]:
    """Return a model's report: its sizes, its mechanisms' matrices, and its layers' states for each text or image."""
    model = _load(opened)
    config, done = opened.config, count(1)
    modules = attention_modules(model, backbone)
    calls = prod(getattr(config, name) for name in backbone.calls) if backbone.calls else len(modules)
    stage, total = f"{opened.label}:", calls * len(samples)
    progress(stage, 0, total)
    run = partial(layer_records, model, backbone, modules, advance=lambda: progress(stage, next(done), total))
    texts = [sample.record | run(sample) for sample in samples]
    mechanisms = [(module, *each) for module in modules for each in getattr(module.attention, "mixers", {}).items()]
    return {
        "name": opened.label,
        "model_type": config.model_type,
        "mixers": getattr(config, "mixers", None) or {},
        "mechanisms": {name: description(mechanism) for _, name, mechanism in mechanisms},
        "drift": recorded_drift(opened.name),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": calls,
        "parts": [part_record(part, modules) for part in backbone.parts],
        "query_heads": query_heads(config),
        "key_value_heads": key_value_heads(config),
        "head_dim": head_size(config),
        "matrices": [
            record
            for module, name, mechanism in mechanisms
            for record in matrix_records(module.part.name, module.layers, name, mechanism)
        ],
        "texts": texts,
    }


def recorded_drift(name: str) -> dict[str, float]:
    """Return the distance of each mechanism from its start that `crosshead train` recorded; empty without a record."""
    repository, revision = split_revision(name)
    flags = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    path = cached_file(repository, TRAINING, revision=revision, **flags)
    metrics = parse_object(Path(path).read_bytes(), f"{name}/{TRAINING}").get("metrics") if path else {}
    items = metrics.items() if isinstance(metrics, dict) else ()
    return {
        key.removeprefix(DRIFT): value for key, value in items if key.startswith(DRIFT) and isinstance(value, float)
    }


def _load(opened: Opened) -> Any:
    """Load the model in float32 on the CPU, with attention that returns its weights."""
    if opened.config.model_type == DIT:
        return load_dit(opened)
    options = {"dtype": torch.float32, "device_map": None, "attn_implementation": "eager"}
    return load_model(opened, model_class(opened.config), **options)


def attention_modules(model: Any, backbone: Backbone) -> list[AttentionModule]:
    """Return the attention modules of a model, part by part; their layers are filled in when the model runs."""
    modules = list(getattr(model, "base_model", model).named_modules())
    named = ((part, module) for part in backbone.parts for name, module in modules if re.fullmatch(part.modules, name))
    return [AttentionModule(part, module, []) for part, module in named]


def part_record(part: Part, modules: Sequence[AttentionModule]) -> dict[str, Any]:
    """Return a part's record: its name, its queries and keys, and the number of its layers."""
    layers = sum(len(module.layers) for module in modules if module.part is part)
    return {"name": part.name, "rows": part.rows, "columns": part.columns, "causal": part.causal, "layers": layers}


@torch.no_grad()
def layer_records(
    model: Any, backbone: Backbone, modules: Sequence[AttentionModule], sample: Sample, advance: Callable[[], None]
) -> dict[str, Any]:
    """Run the model on one sample and return the record of each layer.

    Records are made while the model runs, so that only one layer's attention weights are in memory.
    """
    records: dict[str, list[dict[str, Any]]] = {part.name: [] for part in backbone.parts}
    for module in modules:
        module.layers.clear()

    def receive(module: AttentionModule, states: LayerStates) -> None:
        part, layers = module.part, records[module.part.name]
        if not states.are_finite:
            where = f"{part.name} layer {len(layers)} of {model.config._name_or_path}"
            raise EvalError(f"{where} computes nan or inf on {sample.record['name']!r}: its weights are damaged")
        positions = sample.positions[part.rows] if part.rows == part.columns else None
        module.layers.append(len(layers))
        layers.append({"part": part.name, "layer": len(layers), **layer_record(states, positions, part.causal)})
        advance()

    with ExitStack() as stack:
        for module in modules:
            if backbone is BACKBONES[DIT]:
                stack.enter_context(record_block(module.attention, partial(receive, module)))
            else:
                stack.enter_context(record_states(module.attention, backbone, partial(receive, module)))
        model(**sample.arguments, **dict(backbone.arguments))
    layers = [layer for part_layers in records.values() for layer in part_layers]
    similarity = {}
    for side in ("patterns", "outputs"):
        means = [mean for layer in layers if (mean := layer["mean_similarity"][side]) is not None]
        similarity[side] = rounded(sum(means) / len(means)) if means else None
    return {"mean_similarity": similarity, "layers": layers}
