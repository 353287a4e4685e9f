"""What the backward pass needs of the forward pass, in bytes, for a model that nobody has to make.

Autograd itself says what it keeps, on copies of the model with all its layers, heads, experts and mechanisms, but
narrow widths and short texts. A layer keeps something for each token, more with each width of the model, and where
attention materialises its weights something for each pair of tokens: from a few small copies follows any size.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ..schema.sections import DataOptions, TrainOptions
from ..trainer.trainable import is_wrapped, set_trainable

WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size")
NARROW = 16
"""The least width that every kernel takes."""
SHORT, LONGER, LONGEST = LENGTHS = (8, 16, 24)
VOCABULARY = 16


@dataclass(frozen=True)
class Arithmetic:
    """How a run computes."""

    weights: torch.dtype
    """In which the model's own weights meet its activations."""
    autocast: bool
    """Matrix products alone in bfloat16, whatever the weights are in."""


@dataclass(frozen=True)
class Activations:
    """Bytes, for the sequences of one micro batch."""

    layers: tuple[int, ...]
    layer_input: int
    outside: int
    """Of what is before and after the layers, without logits."""

    def kept(self, checkpointed: bool) -> int:
        """At the end of the forward pass; `checkpointed`, the layers' inputs alone, and the largest layer at work."""
        if checkpointed:
            return len(self.layers) * self.layer_input + max(self.layers) + self.outside
        return sum(self.layers) + self.outside


def activations(config: Any, train: TrainOptions, data: DataOptions, arithmetic: Arithmetic) -> Activations:
    """What a model of this configuration keeps of a micro batch."""
    rows = min(2, train.micro_batch)  # a single sequence saves copies that several need
    inputs = _Inputs(rows, data.separate_documents)
    base, length = _narrow(config), data.length
    real = {name: getattr(config, name) for name in WIDTHS if getattr(config, name, None)}
    first = _Fit.of(base, train, inputs, arithmetic)
    for_token = first.for_token
    for name, width in real.items():
        narrow = getattr(base, name)
        wider = deepcopy(base)
        setattr(wider, name, 2 * narrow)
        with_each = _Fit.of(wider, train, inputs, arithmetic).for_token - first.for_token
        for_token = for_token + with_each / narrow * (width - narrow)
    total = (for_token * length + first.for_pair * length**2) / rows * train.micro_batch
    *layers, outside = (max(0, round(size)) for size in total.tolist())
    layer_input = first.residual.itemsize * config.hidden_size * length * train.micro_batch
    return Activations(tuple(layers), layer_input, outside)


def _narrow(config: Any) -> Any:
    """The configuration with its heads as they are and everything else small."""
    small = deepcopy(config)
    small.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = lcm(NARROW, config.num_attention_heads)
    for name in WIDTHS:
        if getattr(config, name, None):
            setattr(small, name, width)
    small.vocab_size = VOCABULARY
    small.pad_token_id = small.bos_token_id = small.eos_token_id = None
    return small


@dataclass(frozen=True)
class _Inputs:
    """Short texts."""

    rows: int
    separate_documents: bool

    def __call__(self, length: int) -> dict[str, torch.Tensor]:
        """As a run gives them to the model."""
        tokens = torch.zeros(self.rows, length, dtype=torch.long)
        if not self.separate_documents:
            return {"input_ids": tokens}
        positions = torch.arange(length) % (length // 2)  # two documents
        return {"input_ids": tokens, "position_ids": positions.expand(self.rows, -1)}


@dataclass(frozen=True)
class _Fit:
    """What each layer, and last what is outside of them, keeps for a token and for a pair of tokens."""

    for_token: torch.Tensor
    for_pair: torch.Tensor
    residual: torch.dtype

    @classmethod
    def of(cls, config: Any, train: TrainOptions, inputs: _Inputs, arithmetic: Arithmetic) -> "_Fit":
        from transformers import AutoModelForCausalLM

        with torch.random.fork_rng(devices=[]):
            model = AutoModelForCausalLM.from_config(deepcopy(config), dtype=arithmetic.weights).train()
            model = set_trainable(model, train)
            found = [_kept(model, inputs(length), arithmetic.autocast) for length in LENGTHS]
        short, longer, longest = (torch.tensor(kept, dtype=torch.float64) for kept, _ in found)
        step = LONGER - SHORT
        for_pair = (longest - 2 * longer + short) / (2 * step**2)
        for_token = (longer - short) / step - for_pair * (SHORT + LONGER)
        return cls(for_token, for_pair, found[0][1])


def _kept(model: nn.Module, inputs: dict[str, torch.Tensor], autocast: bool) -> tuple[list[int], torch.dtype]:
    """Bytes that each layer saves and, last, all else does; and the dtype of what goes from layer to layer."""
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage()._cdata
        if place not in own:
            saved.setdefault(place, tensor)
        return tensor

    def size() -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())

    marks: list[int] = []
    residual: list[torch.dtype] = []

    def before(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        marks.append(size())
        residual.append(arguments[0].dtype)

    handles = list(_watch(model, before, lambda *_: marks.append(size())))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), saved_tensors_hooks(keep, lambda tensor: tensor):
        model(**inputs, use_cache=False)
    for handle in handles:
        handle.remove()
    layers = [end - begin for begin, end in zip(marks[::2], marks[1::2], strict=True)]
    return [*layers, size() - sum(layers)], residual[0]


def decoder_layers(model: Any) -> Any:
    """In peft's wrapper as well."""
    return (model.get_base_model() if is_wrapped(model) else model).model.layers


def _watch(model: nn.Module, before: Any, after: Any) -> Iterator[Any]:
    for layer in decoder_layers(model):
        yield layer.register_forward_pre_hook(before)
        yield layer.register_forward_hook(after)
