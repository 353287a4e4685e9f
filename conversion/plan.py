"""Conversion plan: the target's config and one action per tensor, decided before anything is written.

The bytes of each tensor are produced when it is written: copied, computed, grown or cast.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from crosshead.common.errors import ConversionError

from .architectures.attention_names import attention_layers, attention_names
from .architectures.families import CROSS_BIAS, FUSED_EXPERTS, INVERSE_FREQUENCIES, NEXT_TOKENS, OTHER_HEADS, Shapes
from .compress.layer_rewrites import LayerRewrites
from .sources.tensor_store import DTYPES, Entry, TensorStore, checked_entry
from .writing.shard_writer import rounded, tensor_chunks, whole_rows

ROWS = 256
"""Number of new vocabulary rows that are built at a time."""


@dataclass(frozen=True)
class Step:
    """A tensor of the target checkpoint and its origin."""

    entry: Entry
    action: str
    """"copied" (byte for byte), "rewritten" (other values, dtype or shape), or "created" (not in the source)."""


@dataclass(frozen=True)
class Plan:
    """The target's config and tensors: reported by a dry run, written by the writer, recorded in conversion.json."""

    config: Any
    shards: dict[str, list[Step]]
    """Shard file name -> the tensors of the shard, in order."""
    dropped: dict[str, str]
    """Source tensor that is not written -> reason."""
    rewrites: LayerRewrites
    """Computes the rewritten and created tensors."""
    decisions: Mapping[str, Any]
    """Fields of conversion.json for choices that depend on the source's outputs on the calibration input."""

    @property
    def steps(self) -> list[Step]:
        """The steps of all shards, in order."""
        return [step for steps in self.shards.values() for step in steps]

    @property
    def size(self) -> int:
        """Total size of the target's tensors in bytes."""
        return sum(step.entry.size for step in self.steps)

    @property
    def counts(self) -> dict[str, int]:
        """Number of tensors per action, including dropped source tensors."""
        actions = [step.action for step in self.steps] + ["dropped"] * len(self.dropped)
        return {action: actions.count(action) for action in ("copied", "rewritten", "created", "dropped")}

    @property
    def is_stock(self) -> bool:
        """True if the target is a stock model, without mechanisms."""
        return not hasattr(self.config, "mixers")


def check_source(store: TensorStore, shapes: Shapes, tied: Mapping[str, str]) -> dict[str, str]:
    """Check that a checkpoint contains exactly the tensors in `shapes`; return the tensors to drop -> reason.

    A `tied` tensor may be stored if it equals the tensor that it is tied to. Further integer tensors, such as a
    buffer of position ids, are allowed.
    """
    dropped = dict.fromkeys(filter(INVERSE_FREQUENCIES.fullmatch, store.entries), "computed from the config")
    if CROSS_BIAS in store.entries:
        dropped[CROSS_BIAS] = "of cross-attention, which has no position bias"
    further = [name for name in store.entries if name not in shapes]
    dropped |= dict.fromkeys(
        filter(OTHER_HEADS.fullmatch, further), "a head that the class in config.json does not have"
    )
    mtp_prefixes = tuple(match[1] for match in map(NEXT_TOKENS.fullmatch, store.entries) if match)
    mtp_names = (name for name in further if name.startswith(mtp_prefixes))
    dropped |= dict.fromkeys(mtp_names, "of a layer that predicts further tokens, which the class does not have")
    for name, other in tied.items():
        if name in store.entries and other in store.entries and not same_bytes(store, name, other):
            raise ConversionError(
                f"the config has tie_word_embeddings=true, but {name} differs from {other}: set it to false"
            )
        if name in store.entries:
            dropped[name] = f"tied to {other}"
    if fused := next(filter(FUSED_EXPERTS.fullmatch, store.entries), None):
        raise ConversionError(
            f"the tensor {fused} holds all experts of its layer: load the checkpoint with transformers and save it "
            "with save_pretrained, which gives each expert its own tensors"
        )
    for name, shape in shapes.items():
        entry = checked_entry(store, name, shape)
        if entry.is_integer:
            raise ConversionError(
                f"the tensor {name} is stored as {entry.dtype!r}: weights must be one of {', '.join(DTYPES)}; give "
                "the unquantised checkpoint"
            )
    for name, entry in store.entries.items():
        if name not in shapes and name not in dropped and not entry.is_integer:
            raise ConversionError(
                f"the tensor {name} is not part of this model type: remove it from the checkpoint, or use a "
                "checkpoint of the plain causal language model"
            )
    return dropped


def same_bytes(store: TensorStore, first: str, second: str) -> bool:
    """True if two stored tensors have the same dtype, shape and bytes; compares chunk by chunk."""
    if replace(store.entries[first], name=second) != store.entries[second]:
        return False
    return all(
        bytes(left) == bytes(right) for left, right in zip(store.chunks(first), store.chunks(second), strict=True)
    )


def make_plan(
    source: TensorStore,
    config: Any,
    shapes: Shapes,
    dropped: Mapping[str, str],
    rewrites: LayerRewrites,
    dtype: str | None = None,
    decisions: Mapping[str, Any] | None = None,
) -> Plan:
    """Return a plan that assigns the target's tensors to the source's shards; `config` and `shapes` are the target's.

    A created tensor is stored after its layer's output projection. Integer tensors outside the model are copied.
    """
    created: dict[str, list[str]] = {}
    for name in sorted(shapes.keys() - source.entries.keys()):
        output = attention_names(config, rewrites.layers[name]).stored("o_proj.weight")
        created.setdefault(output, []).append(name)
    shards: dict[str, list[Step]] = {}
    replaced: dict[str, str] = {}
    for file, names in source.shards.items():
        steps = []
        for name in names:
            stored = source.entries[name]
            if name not in shapes and not stored.is_integer:
                replaced[name] = "replaced by the tensors that it was combined into"
            elif name in shapes or name not in dropped:
                entry = Entry(name, stored.dtype_in(dtype), shapes.get(name, stored.shape))
                is_copied = entry == stored and name not in rewrites.layers
                steps.append(Step(entry, "copied" if is_copied else "rewritten"))
                steps += [Step(Entry(new, entry.dtype, shapes[new]), "created") for new in created.get(name, ())]
        if steps:
            shards[file] = steps
    return Plan(config, shards, replaced | dict(dropped), rewrites, decisions or {})


def minimum_size(config: Any, store: TensorStore, dropped: Container[str], dtype: str | None) -> int:
    """Return a lower bound of the target's size in bytes: all tensors outside attention layers."""
    attention = tuple(attention_names(config, layer).prefix for layer in attention_layers(config))
    return sum(
        replace(entry, dtype=entry.dtype_in(dtype)).size
        for name, entry in store.entries.items()
        if name not in dropped and not name.startswith(attention)
    )


def produce(store: TensorStore, step: Step, rewrites: LayerRewrites) -> Iterator[memoryview]:
    """Yield the bytes of one tensor of the target: copied, computed, grown or cast."""
    entry = step.entry
    if step.action == "copied":
        yield from store.chunks(entry.name)
    elif entry.name in rewrites.layers:
        yield from tensor_chunks(rounded(rewrites.tensor(entry.name), entry))
    elif entry.shape != store.entries[entry.name].shape:
        yield from grown(store, entry)
    else:
        yield from tensor_chunks(rounded(store.read(entry.name), entry))


def grown(store: TensorStore, entry: Entry) -> Iterator[memoryview]:
    """Yield the bytes of an embedding or LM head with additional rows, each equal to the mean of the stored rows.

    A new token then starts as the average token, and the logits of the other tokens do not change.
    """
    stored = store.entries[entry.name]
    source, target = DTYPES[stored.dtype], DTYPES[entry.dtype]
    width = prod(entry.shape[1:])  # 1 for a bias
    total = torch.zeros(width, dtype=torch.float64)
    for block in whole_rows(store.chunks(entry.name), width * source.itemsize):
        rows = torch.frombuffer(block, dtype=source).reshape(-1, width)
        total += rows.double().sum(0)
        yield from tensor_chunks(rounded(rows, entry))
    mean = (total / stored.shape[0]).to(target)
    for start in range(stored.shape[0], entry.shape[0], ROWS):
        yield from tensor_chunks(mean.repeat(min(ROWS, entry.shape[0] - start), 1))


def check_vocabulary(requested: int, current: int) -> None:
    """Raise `ConversionError` if the vocabulary would shrink."""
    if requested < current:
        raise ConversionError(f"--vocab-size {requested} is less than the model's {current}: use {current} or more")
