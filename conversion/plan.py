"""The plan of a conversion: the action for every tensor, decided before anything is written."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from crosshead.common.errors import ConversionError

from .architectures.families import FUSED_EXPERTS, Shapes, ignored, layer_prefix
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
    """The target's shards in order, and what of the source is not in them."""

    shards: dict[str, list[Step]]
    dropped: dict[str, str]
    """Name in the source -> why."""

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(step.entry.size for steps in self.shards.values() for step in steps)


def check_source(store: TensorStore, shapes: Shapes, tied: bool) -> dict[str, str]:
    """That a checkpoint holds what it should, whole; returns the tensors to drop, each with its reason.

    Integers that are no part of the model, such as a buffer of position ids, are let through.
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
    store: TensorStore, shapes: Shapes, dropped: Mapping[str, str], rewritten: Iterable[str], dtype: str | None
) -> Plan:
    """The target's tensors in the source's shards: `shapes` is the target's, `rewritten` those whose values change.

    What is created goes beside its layer's output projection. Integers that are no part of the model are copied.
    """
    changes = set(rewritten)
    created: dict[str, list[str]] = {}
    for name in shapes.keys() - store.entries.keys():
        created.setdefault(_neighbour(name), []).append(name)
    shards: dict[str, list[Step]] = {}
    for file, names in store.shards.items():
        steps = []
        for name in names:
            stored = store.entries[name]
            if name not in shapes and (name in dropped or not stored.is_integer):
                continue
            entry = Entry(name, stored.dtype_in(dtype), shapes.get(name, stored.shape))
            same = entry == stored and name not in changes
            steps.append(Step(entry, "copied" if same else "rewritten"))
            new = sorted(created.get(name, ()))
            steps += [Step(Entry(created_name, entry.dtype, shapes[created_name]), "created") for created_name in new]
        if steps:
            shards[file] = steps
    gone = {
        name: "replaced by what it was combined into"
        for name, stored in store.entries.items()
        if name not in shapes and not stored.is_integer
    }
    return Plan(shards, gone | dict(dropped))


def least_size(store: TensorStore, dropped: Iterable[str], dtype: str | None) -> int:
    """Bytes that a target takes however few of the key and value heads are kept."""
    gone = set(dropped)
    return sum(
        replace(entry, dtype=entry.dtype_in(dtype)).size
        for name, entry in store.entries.items()
        if name not in gone and "k_proj" not in name and "v_proj" not in name
    )


def _neighbour(created: str) -> str:
    layer = int(created.split(".")[2])
    return f"{layer_prefix(layer)}self_attn.o_proj.weight"


def describe(plan: Plan) -> dict[str, Any]:
    """The number of tensors of each action."""
    actions = [step.action for steps in plan.shards.values() for step in steps] + ["dropped"] * len(plan.dropped)
    return {action: actions.count(action) for action in ("copied", "rewritten", "created", "dropped")}
