"""The plan of a conversion: the target's configuration and the action for every tensor, made before writing."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from crosshead.common.errors import ConversionError

from .architectures.families import FUSED_EXPERTS, Shapes, ignored, layer_prefix
from .compress.layer_rewrites import LayerRewrites
from .sources.tensor_store import DTYPES, Entry, TensorStore

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Step:
    """One tensor of the target."""

    entry: Entry
    action: str
    """copied (byte for byte), rewritten, or created."""


@dataclass(frozen=True)
class Plan:
    """The target model. The dry run prints it, the writer executes it, and the record and a resumed run follow it."""

    config: Any
    """The target's configuration."""
    shards: dict[str, list[Step]]
    """File name -> its tensors, in order."""
    dropped: dict[str, str]
    """Name of a tensor in the source that is not written -> the reason."""
    rewrites: LayerRewrites
    """Computes the tensors that are rewritten or created."""
    decisions: Mapping[str, Any]
    """Choices that depend on the source's outputs for a text, for the record."""

    @property
    def steps(self) -> list[Step]:
        """The tensors of all shards."""
        return [step for steps in self.shards.values() for step in steps]

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(step.entry.size for step in self.steps)

    @property
    def counts(self) -> dict[str, int]:
        """The number of tensors of each action."""
        actions = [step.action for step in self.steps] + ["dropped"] * len(self.dropped)
        return {action: actions.count(action) for action in ("copied", "rewritten", "created", "dropped")}

    @property
    def is_stock(self) -> bool:
        """Whether the target is a stock model."""
        return not hasattr(self.config, "mixers")


def check_source(store: TensorStore, shapes: Shapes, tied: bool) -> dict[str, str]:
    """Check that a checkpoint holds the tensors of its model; returns the tensors to drop, each with the reason.

    Integers that are no part of the model, such as a buffer of position ids, are allowed.
    """
    dropped = {name: reason for name in store.entries if name not in shapes and (reason := ignored(name))}
    if tied and HEAD in store.entries:
        if not same_bytes(store, HEAD, EMBEDDING):
            raise ConversionError(
                f"the config says tie_word_embeddings=true, but {HEAD} differs from {EMBEDDING}: set it to false"
            )
        dropped[HEAD] = f"tied to {EMBEDDING}"
    if fused := next(filter(FUSED_EXPERTS.fullmatch, store.entries), None):
        raise ConversionError(
            f"the tensor {fused} holds all experts of its layer: load the checkpoint with transformers and save it "
            "with save_pretrained, which gives each expert its own tensors"
        )
    for name, shape in shapes.items():
        entry = store.entries.get(name)
        if entry is None:
            raise ConversionError(f"the tensor {name} is missing: the config asks for it in the shape {list(shape)}")
        if entry.shape != shape:
            raise ConversionError(
                f"the tensor {name} has the shape {list(entry.shape)}, but the config asks for {list(shape)}"
            )
        if entry.is_integer:
            raise ConversionError(
                f"the tensor {name} is stored as {entry.dtype!r}: weights must be one of {', '.join(DTYPES)}; give "
                "the unquantised checkpoint"
            )
    for name, entry in store.entries.items():
        if name not in shapes and name not in dropped and not entry.is_integer:
            raise ConversionError(
                f"the tensor {name} is not part of this kind of model: take it out of the checkpoint, or use a "
                "checkpoint of the plain causal language model"
            )
    return dropped


def same_bytes(store: TensorStore, one: str, other: str) -> bool:
    """Whether two tensors are equal, read piece by piece."""
    first, second = store.entries.get(one), store.entries.get(other)
    if first is None or second is None or replace(first, name="") != replace(second, name=""):
        return False
    pairs = zip(store.chunks(one), store.chunks(other), strict=True)
    return all(bytes(left) == bytes(right) for left, right in pairs)


def make_plan(
    source: TensorStore,
    config: Any,
    shapes: Shapes,
    dropped: Mapping[str, str],
    rewrites: LayerRewrites,
    dtype: str | None = None,
    decisions: Mapping[str, Any] | None = None,
) -> Plan:
    """Put the target's tensors into the source's shards; `shapes` and `config` are the target's.

    A created tensor goes after its layer's output projection. Integers that are no part of the model are copied.
    """
    created: dict[str, list[str]] = {}
    for name in sorted(shapes.keys() - source.entries.keys()):
        created.setdefault(f"{layer_prefix(int(name.split('.')[2]))}self_attn.o_proj.weight", []).append(name)
    shards: dict[str, list[Step]] = {}
    for file, names in source.shards.items():
        steps = []
        for name in names:
            stored = source.entries[name]
            if name not in shapes and (name in dropped or not stored.is_integer):
                continue
            entry = Entry(name, stored.dtype_in(dtype), shapes.get(name, stored.shape))
            same = entry == stored and name not in rewrites.layers
            steps.append(Step(entry, "copied" if same else "rewritten"))
            steps += [Step(Entry(new, entry.dtype, shapes[new]), "created") for new in created.get(name, ())]
        if steps:
            shards[file] = steps
    replaced = {
        name: "replaced by the tensors that it was combined into"
        for name, stored in source.entries.items()
        if name not in shapes and not stored.is_integer
    }
    return Plan(config, shards, replaced | dict(dropped), rewrites, decisions or {})


def least_size(store: TensorStore, dropped: Iterable[str], dtype: str | None) -> int:
    """A lower bound of the target's bytes: without any key and value heads."""
    gone = set(dropped)
    return sum(
        replace(entry, dtype=entry.dtype_in(dtype)).size
        for name, entry in store.entries.items()
        if name not in gone and "k_proj" not in name and "v_proj" not in name
    )
