"""Writes the model of a plan: shards, tokenizer and config, and the new rows of a larger vocabulary."""

from collections.abc import Iterator
from functools import partial
from math import prod

import torch

from crosshead.common.errors import ConversionError
from crosshead.common.progress import Counter, Progress

from ..compress.layer_rewrites import LayerRewrites
from ..plan import Plan, Step
from ..sources.model_folder import (
    CONFIG,
    add_legacy_fields,
    copy_files,
    remove_access_tokens,
    remove_loading_arguments,
)
from ..sources.resolve import Source
from ..sources.safetensors_store import WEIGHTS
from ..sources.tensor_store import DTYPES, Entry, TensorStore
from .atomic_output import AtomicOutput
from .shard_writer import rounded, tensor_chunks, whole_rows, write_index, write_shard

ROWS = 256
"""Number of new vocabulary rows that are built at a time."""


def write_model(
    source: Source, plan: Plan, output: AtomicOutput, progress: Progress
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Write all files; return tensor name -> CRC-32, and per file the JSON keys that contained access tokens."""
    output.expect({file: [step.entry for step in steps] for file, steps in plan.shards.items()})
    digests = write_weights(source.store, plan, output, progress)
    copy_files(source.files, output.folder)
    remove_loading_arguments(output.folder)
    plan.config.save_pretrained(output.folder)
    left_out = remove_access_tokens(source.config, output.folder)
    if plan.is_stock:
        add_legacy_fields(output.folder / CONFIG, plan.config)
    return digests, left_out


def write_weights(store: TensorStore, plan: Plan, output: AtomicOutput, progress: Progress) -> dict[str, str]:
    """Write the shards that are not finished yet, then the index; return tensor name -> CRC-32."""
    digests: dict[str, str] = {}
    written = Counter(progress, "writing", plan.size)
    for file, steps in plan.shards.items():
        if file in output.finished:
            written.add(sum(step.entry.size for step in steps))
        else:
            items = [(step.entry, partial(_chunks, store, step, plan.rewrites, written)) for step in steps]
            output.record(file, write_shard(output.folder / file, items))
        digests |= output.finished[file]
    if list(plan.shards) != [WEIGHTS]:
        write_index(output.folder, {file: [step.entry for step in steps] for file, steps in plan.shards.items()})
    return digests


def _chunks(store: TensorStore, step: Step, rewrites: LayerRewrites, written: Counter) -> Iterator[memoryview]:
    for chunk in produce(store, step, rewrites):
        yield chunk
        written.add(chunk.nbytes)


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


def check_vocabulary(requested: int, current: int) -> None:
    """Raise `ConversionError` if the vocabulary would shrink."""
    if requested < current:
        raise ConversionError(f"--vocab-size {requested} is less than the model's {current}: use {current} or more")


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
