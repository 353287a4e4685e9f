"""Bytes that the forward pass saves for the backward pass, without building the model.

Autograd reports what it saves on copies of the model with all layers, heads, experts and mechanisms, but narrow widths
and short texts. A layer saves bytes for each token, which grow linearly with each width of the model, and bytes for
each pair of tokens if its attention materialises the weights. A few small copies determine these coefficients.
"""

from copy import deepcopy
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ..schema.sections import DataOptions, TrainOptions
from ..trainer.parameters import has_lora, set_trainable

WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size")
NARROW = 16
"""The smallest width that every kernel supports."""
LENGTHS = (8, 16, 24)
VOCABULARY = 16


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run's computation."""

    weights: torch.dtype
    """Of the weights in the model's own operations."""
    autocast: bool
    """Whether matrix products are in bfloat16, for any dtype of the weights."""


@dataclass(frozen=True)
class Activations:
    """Bytes for the sequences of one micro batch."""

    layers: tuple[int, ...]
    layer_input: int
    outside: int
    """Before and after the layers, without logits."""

    def total(self, checkpointed: bool) -> int:
        """At the end of the forward pass; `checkpointed`, the inputs of layers and one whole layer."""
        if checkpointed:
            return len(self.layers) * self.layer_input + max(self.layers) + self.outside
        return sum(self.layers) + self.outside


def activations(config: Any, train: TrainOptions, data: DataOptions, precision: Precision) -> Activations:
    """The activations of a model with this configuration."""
    rows = min(2, train.micro_batch)  # a single sequence is copied in places where several are not
    narrow = _narrow(config)
    token, pair, residual = _coefficients(narrow, train, data, precision, rows)
    per_token = token
    for name in WIDTHS:
        width = getattr(config, name, None)
        if width:
            least = getattr(narrow, name)
            wider = deepcopy(narrow)
            setattr(wider, name, 2 * least)
            slope = (_coefficients(wider, train, data, precision, rows)[0] - token) / least
            per_token = per_token + slope * (width - least)
    total = (per_token * data.length + pair * data.length**2) / rows * train.micro_batch
    *layers, outside = (max(0, round(size)) for size in total.tolist())
    layer_input = residual.itemsize * config.hidden_size * data.length * train.micro_batch
    return Activations(tuple(layers), layer_input, outside)


def _narrow(config: Any) -> Any:
    """The configuration with the same heads, and everything else small."""
    small = deepcopy(config)
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
    """Bytes of each layer, and last of all outside of layers, for a token and for a pair; the dtype between layers."""
    from transformers import AutoModelForCausalLM

    found = []
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(deepcopy(config), dtype=precision.weights).train()
        model = set_trainable(model, train)
        for length in LENGTHS:
            inputs = {"input_ids": torch.zeros(rows, length, dtype=torch.long)}
            if data.separate_documents:  # two of them
                inputs["position_ids"] = (torch.arange(length) % (length // 2)).expand(rows, -1)
            found.append(_saved(model, inputs, precision.autocast))
    short, middle, long = (torch.tensor(saved, dtype=torch.float64) for saved, _ in found)
    step = LENGTHS[1] - LENGTHS[0]
    pair = (long - 2 * middle + short) / (2 * step**2)
    token = (middle - short) / step - pair * (LENGTHS[0] + LENGTHS[1])
    return token, pair, found[0][1]


def _saved(model: nn.Module, inputs: dict[str, torch.Tensor], autocast: bool) -> tuple[list[int], torch.dtype]:
    """Bytes that each layer saves and, last, all that is outside of layers; and the dtype between layers."""
    weights = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.Tensor] = {}
    marks: list[int] = []
    residual: list[torch.dtype] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in weights:
            saved.setdefault(storage, tensor)
        return tensor

    def mark(*_: Any) -> None:
        marks.append(sum(tensor.untyped_storage().nbytes() for tensor in saved.values()))

    def before(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        mark()
        residual.append(arguments[0].dtype)

    handles = [layer.register_forward_pre_hook(before) for layer in decoder_layers(model)]
    handles += [layer.register_forward_hook(mark) for layer in decoder_layers(model)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**inputs, use_cache=False)
    mark()
    for handle in handles:
        handle.remove()
    *bounds, total = marks
    layers = [end - begin for begin, end in zip(bounds[::2], bounds[1::2], strict=True)]
    return [*layers, total - sum(layers)], residual[0]


def decoder_layers(model: Any) -> Any:
    """The layers of a model, also in peft's wrapper."""
    return (model.get_base_model() if has_lora(model) else model).model.layers
