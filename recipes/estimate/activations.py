"""Estimate of activation memory: bytes saved by the forward pass for the backward pass, without the full model.

The sizes of the tensors that autograd saves are measured on small copies of the model: all layers, heads, experts and
mechanisms, but narrow widths and short sequences. A layer saves bytes per token, which grow linearly with each width,
and bytes per pair of tokens if its attention materialises the weights. A few small copies determine these
coefficients. Models other than decoders are measured at their full length, since the length of T5's decoder follows
from its encoder's. Models with stages, which have a width per stage, are measured at full size.
"""

from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
import transformers
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.albert.modeling_albert import AlbertLayerGroup

from ..schema.model_config import DECODERS
from ..schema.recipe import Recipe
from ..schema.sections import DataOptions, TrainOptions
from ..trainer.objectives import objective_of
from ..trainer.parameters import set_trainable

WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size", "d_ff", "embedding_size")
NARROW = 16
"""Minimum width that every kernel supports."""
LENGTHS = (8, 16, 24)
VOCABULARY = 16
LAYERS = (GradientCheckpointingLayer, AlbertLayerGroup)
"""Base classes of transformer layers in transformers."""


@dataclass(frozen=True)
class Precision:
    """Dtypes of a run's computation."""

    weights: torch.dtype
    """Dtype of the weights outside autocast."""
    autocast: bool
    """Whether bfloat16 autocast is on: matrix products in bfloat16, whatever the dtype of the weights."""


@dataclass(frozen=True)
class Activations:
    """Bytes of saved activations for one micro batch."""

    layers: tuple[int, ...]
    """Bytes that each layer saves."""
    inputs: int
    """Bytes of the inputs of all layers."""
    outside: int
    """Bytes saved before and after the layers, without logits."""

    def total(self, checkpointed: bool) -> int:
        """Return the bytes at the end of the forward pass.

        With activation checkpointing (`checkpointed`), only the inputs of all layers, one recomputed layer and the
        tensors outside of the layers are stored.
        """
        if checkpointed:
            return self.inputs + max(self.layers) + self.outside
        return sum(self.layers) + self.outside


def activations(config: Any, train: TrainOptions, data: DataOptions, precision: Precision) -> Activations:
    """Estimate the activations of a decoder with this configuration."""
    rows = min(2, train.micro_batch)  # batch size 1 saves more per sequence: some operations copy only then
    narrow = _narrow(config)
    token, pair, residual = _coefficients(narrow, train, data, precision, rows)

    def growth(wider: Any) -> torch.Tensor:
        return _coefficients(wider, train, data, precision, rows)[0] - token

    per_token = token + _slopes(config, narrow, growth)
    total = (per_token * data.length + pair * data.length**2) / rows * train.micro_batch
    *layers, outside = (max(0, round(size)) for size in total.tolist())
    layer_input = residual.itemsize * config.hidden_size * data.length * train.micro_batch
    return Activations(tuple(layers), layer_input * len(layers), outside)


def activations_at_length(config: Any, recipe: Recipe, precision: Precision) -> Activations:
    """Estimate the activations of a model other than a decoder, for samples of the recipe's objective."""
    objective, kind = objective_of(recipe), getattr(transformers, recipe.objective.auto_class)
    rows = min(2, recipe.train.micro_batch)

    def saved(variant: Any) -> tuple[torch.Tensor, int]:
        with torch.random.fork_rng(devices=[]):
            model = set_trainable(kind.from_config(deepcopy(variant), dtype=precision.weights).train(), recipe.train)
            sizes, inputs = _saved(model, objective.example(variant, rows), precision.autocast)
        return torch.tensor(sizes, dtype=torch.float64), sum(size.numel() * size.itemsize for size in inputs)

    has_stages = isinstance(config.num_attention_heads, list | tuple)
    narrow = config if has_stages else _narrow(config)
    narrow_bytes, inputs = saved(narrow)
    slopes = 0.0 if has_stages else _slopes(config, narrow, lambda wider: saved(wider)[0] - narrow_bytes)
    total = (narrow_bytes + slopes) / rows * recipe.train.micro_batch
    *layers, outside = (max(0, round(size)) for size in total.tolist())
    scale = recipe.train.micro_batch / rows * config.hidden_size / narrow.hidden_size
    return Activations(tuple(layers), round(inputs * scale), outside)


def _slopes(config: Any, narrow: Any, growth: Callable[[Any], torch.Tensor]) -> Any:
    """Return the bytes that the model's real widths add to its narrow copy, by linear extrapolation.

    `growth` returns the bytes that a copy with one doubled width adds to the narrow copy.
    """
    extra: Any = 0.0
    for name in WIDTHS:
        width = getattr(config, name, None)
        if width:
            narrow_width = getattr(narrow, name)
            wider = deepcopy(narrow)
            setattr(wider, name, 2 * narrow_width)
            extra = extra + growth(wider) / narrow_width * (width - narrow_width)
    return extra


def _narrow(config: Any) -> Any:
    """Return a copy of the configuration with the same layers and heads, small widths and a small vocabulary."""
    small = deepcopy(config)
    if DECODERS in getattr(config, "auto_classes", (DECODERS,)):  # other models derive it from the hidden size
        small.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name in WIDTHS:
        if getattr(config, name, None):
            setattr(small, name, lcm(NARROW, config.num_attention_heads))
    small.vocab_size = VOCABULARY
    small.pad_token_id = small.bos_token_id = small.eos_token_id = None
    return small


def _coefficients(
    config: Any, train: TrainOptions, data: DataOptions, precision: Precision, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    """Return bytes per token and per pair of tokens (layers + 1 each), and the dtype of the hidden states.

    The last element is for everything outside of the layers.
    """
    results = []
    with torch.random.fork_rng(devices=[]):
        model = transformers.AutoModelForCausalLM.from_config(deepcopy(config), dtype=precision.weights).train()
        model = set_trainable(model, train)
        for length in LENGTHS:
            inputs = {"input_ids": torch.zeros(rows, length, dtype=torch.long)}
            if data.separate_documents:  # two documents per window
                inputs["position_ids"] = (torch.arange(length) % (length // 2)).expand(rows, -1)
            results.append(_saved(model, inputs | {"use_cache": False}, precision.autocast))
    short, middle, long = (torch.tensor(saved, dtype=torch.float64) for saved, _ in results)
    step = LENGTHS[1] - LENGTHS[0]
    pair = (long - 2 * middle + short) / (2 * step**2)
    token = (middle - short) / step - pair * (LENGTHS[0] + LENGTHS[1])
    return token, pair, results[0][1][0].dtype


def _saved(model: nn.Module, inputs: dict[str, Any], autocast: bool) -> tuple[list[int], list[torch.Tensor]]:
    """Run a forward pass; return the bytes saved by each layer and, last, outside of layers, and the layer inputs."""
    weights = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.Tensor] = {}
    marks: list[int] = []
    layer_inputs: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in weights:
            saved.setdefault(storage, tensor)
        return tensor

    def mark(*_: Any) -> None:
        marks.append(sum(tensor.untyped_storage().nbytes() for tensor in saved.values()))

    def before(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        mark()
        layer_inputs.append(arguments[0])

    with ExitStack() as hooks:
        for layer in model_layers(model):
            hooks.enter_context(layer.register_forward_pre_hook(before))
            hooks.enter_context(layer.register_forward_hook(mark))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), saved_tensors_hooks(pack, lambda tensor: tensor):
            model(**inputs)
    mark()
    *bounds, total = marks
    layers = [end - begin for begin, end in zip(bounds[::2], bounds[1::2], strict=True)]
    return [*layers, total - sum(layers)], layer_inputs


def model_layers(model: nn.Module) -> list[nn.Module]:
    """Return the transformer layers of a model, which may be in peft's wrapper."""
    return [module for module in model.modules() if isinstance(module, LAYERS)]
