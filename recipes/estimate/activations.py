"""Estimate of activation memory: bytes saved by the forward pass for the backward pass, without the full model.

The sizes of the tensors that autograd saves are measured on small copies of the model: all layers, heads, experts and
mechanisms, but narrow widths and short sequences. A layer saves bytes per token, which grow linearly with each width,
and bytes per pair of tokens if its attention materialises the weights. A few small copies determine these
coefficients. Models other than decoders are measured at their full length, since the length of T5's decoder follows
from its encoder's. Models with stages, which have a width per stage, are measured at full size.
"""

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
from ..schema.sections import DataOptions
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
        """Return the bytes at the end of the forward pass; checkpointed layers but one store only their input."""
        if checkpointed:
            return self.inputs + max(self.layers) + self.outside
        return sum(self.layers) + self.outside


def activations(config: Any, recipe: Recipe, precision: Precision) -> Activations:
    """Estimate the activations of a model with this configuration, for samples of the recipe's objective."""
    kind, train = getattr(transformers, recipe.objective.auto_class), recipe.train
    rows = min(2, train.micro_batch)  # batch size 1 saves more per sequence: some operations copy only then

    def saved(variant: Any) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            model = set_trainable(kind.from_config(deepcopy(variant), dtype=precision.weights).train(), train)
            if recipe.objective.auto_class == DECODERS:
                return _saved_by_decoder(model, recipe.data, precision.autocast, rows)
            return _saved(model, objective_of(recipe).example(variant, rows), precision.autocast)

    if isinstance(config.num_attention_heads, list | tuple):  # a model with stages
        total = saved(config)
    else:
        narrow = _narrow(config)
        narrow_bytes = total = saved(narrow)
        for name in WIDTHS:  # extrapolate from a copy with one doubled width
            if width := getattr(config, name, None):
                narrow_width, wider = getattr(narrow, name), deepcopy(narrow)
                setattr(wider, name, 2 * narrow_width)
                total = total + (saved(wider) - narrow_bytes) / narrow_width * (width - narrow_width)
    *layers, outside, inputs = (max(0, round(size)) for size in (total / rows * train.micro_batch).tolist())
    return Activations(tuple(layers), inputs, outside)


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


def _saved_by_decoder(model: nn.Module, data: DataOptions, autocast: bool, rows: int) -> torch.Tensor:
    """Return what `_saved` would return for windows of `data.length` tokens, from the values for short windows.

    The bytes are a sum of a multiple of the number of tokens and a multiple of the number of pairs of tokens.
    """
    results = []
    for length in LENGTHS:
        inputs = {"input_ids": torch.zeros(rows, length, dtype=torch.long)}
        if data.separate_documents:  # two documents per window
            inputs["position_ids"] = (torch.arange(length) % (length // 2)).expand(rows, -1)
        results.append(_saved(model, inputs | {"use_cache": False}, autocast))
    short, middle, long = results
    step = LENGTHS[1] - LENGTHS[0]
    pair = (long - 2 * middle + short) / (2 * step**2)
    token = (middle - short) / step - pair * (LENGTHS[0] + LENGTHS[1])
    return token * data.length + pair * data.length**2


def _saved(model: nn.Module, inputs: dict[str, Any], autocast: bool) -> torch.Tensor:
    """Run a forward pass; return the bytes that each layer saves, those outside of layers, and the layers' inputs."""
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
    input_bytes = sum(tensor.numel() * tensor.itemsize for tensor in layer_inputs)
    return torch.tensor([*layers, total - sum(layers), input_bytes], dtype=torch.float64)


def model_layers(model: nn.Module) -> list[nn.Module]:
    """Return the transformer layers of a model, which may be in peft's wrapper."""
    return [module for module in model.modules() if isinstance(module, LAYERS)]
