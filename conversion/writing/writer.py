"""One conversion, in either direction: from a plan to a complete folder at the target's place."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..compress.layer_rewrites import LayerRewrites
from ..plan import Plan, Step, describe
from ..sources.model_folder import (
    CONFIG,
    RECORD,
    add_older_names,
    check_record,
    copy_files,
    drop_tokens,
    forget_loading,
    record_file,
    store_digest,
    versions,
    write_json,
)
from ..sources.resolve import Source
from ..sources.safetensors_store import WEIGHTS
from ..sources.tensor_store import TensorStore
from ..verification.tolerances import Tolerance
from .atomic_output import Staging, check_apart, staging
from .shard_writer import Item, rounded, tensor_chunks, write_index, write_shard
from .vocabulary import grown

Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is."""


def silent(stage: str, done: int, total: int) -> None:
    """Progress for nobody."""


@dataclass(frozen=True)
class Prepared:
    """What is written."""

    config: Any
    """The target's configuration."""
    plan: Plan
    rewrites: LayerRewrites
    observed: Mapping[str, Any]
    """What the source's behaviour on text decided, for the record."""


@dataclass(frozen=True)
class Job:
    """What is decided before the source is run or anything is written."""

    command: str
    source: Source
    options: Mapping[str, Any]
    """As asked for, for the record; with the source they determine the result."""
    least: int
    """Bytes that the result will take at least."""
    kept: int
    """Bytes that lie beside it until it is complete, at most."""
    computed: bool
    """Numbers are computed, and not only copied, made or put in another format."""
    tolerance: Tolerance | None
    """How far the result may be from the source; None where any distance may be right."""
    prepare: Callable[[Callable[[str], Path], Progress], Prepared]
    """Given where to keep files for a run that goes on where this one stops, by their names."""

    @property
    def identity(self) -> dict[str, Any]:
        """Equal for two runs that would write the same bytes; as JSON."""
        content = {
            "command": self.command,
            "source": self.source.fingerprint,
            "options": dict(self.options),
            "versions": versions(),
            "processor": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads() if self.computed else None,  # they decide on roundings, too
        }
        return json.loads(json.dumps(content))


Verify = Callable[[Job, Path, Progress], dict[str, Any]]
"""Measures a finished folder against the job's source; `ConversionError` where it is not what it ought to be."""


def run_job(
    job: Job, out: Path, overwrite: bool, restart: bool, verify: Verify | None, progress: Progress
) -> dict[str, Any]:
    """Write the target beside its place, verify it there, and put it in its place; returns the record.

    What an unfinished run of the same job has left is used, unless `restart` discards it.
    """
    out = Path(os.path.expanduser(out))
    for place in job.source.store.places:
        check_apart(place, out)
    with staging(out, job.identity, overwrite, restart) as stage:
        if job.command == "fold":
            check_record(out, overwrite)
        stage.check_room(job.least, job.kept)
        prepared = job.prepare(stage.keep, progress)
        stage.expect({file: [step.entry for step in steps] for file, steps in prepared.plan.shards.items()})
        digests = write_weights(job, prepared, stage, progress)
        copy_files(job.source.files, stage.folder)
        forget_loading(stage.folder)
        prepared.config.save_pretrained(stage.folder)
        left_out = drop_tokens(job.source.config, stage.folder)
        stock = not hasattr(prepared.config, "mixers")
        if stock:
            add_older_names(stage.folder / CONFIG, prepared.config)
        content = record(job, prepared, digests) | {"left_out": left_out}
        if verify is not None:
            stage.unverified = True
            content["verification"] = verify(job, stage.folder, progress)
            stage.unverified = False
        place = record_file(out, stock)
        write_json(stage.folder / RECORD if place.name == RECORD else stage.beside(place.name), content)
        others = stage.publish()
    return content | {"folder": str(out)} | ({"others": others} if others else {})


def write_weights(job: Job, prepared: Prepared, stage: Staging, progress: Progress) -> dict[str, str]:
    """All shards that are not finished yet, then the index; returns every tensor's digest."""
    digests: dict[str, str] = {}
    plan, done, total = prepared.plan, 0, prepared.plan.size  # which takes time where tensors are many
    for file, steps in plan.shards.items():
        if file not in stage.finished:
            written = [done]

            def advance(size: int, written: list[int] = written) -> None:
                written[0] += size
                progress("writing", written[0], total)

            items = [_item(job.source.store, step, prepared.rewrites, advance) for step in steps]
            stage.record(file, write_shard(stage.folder / file, items))
        digests |= stage.finished[file]
        done += sum(step.entry.size for step in steps)
        progress("writing", done, total)
    if list(plan.shards) != [WEIGHTS]:
        write_index(stage.folder, {file: [step.entry for step in steps] for file, steps in plan.shards.items()})
    return digests


def _item(store: TensorStore, step: Step, rewrites: LayerRewrites, advance: Callable[[int], None]) -> Item:
    def chunks() -> Iterator[memoryview]:
        for chunk in produce(store, step, rewrites):
            yield chunk
            advance(chunk.nbytes)

    return step.entry, chunks


def produce(store: TensorStore, step: Step, rewrites: LayerRewrites) -> Iterator[memoryview]:
    """The bytes of one tensor of the target."""
    entry = step.entry
    if step.fate == "copied":
        yield from store.chunks(entry.name)
    elif entry.name in rewrites.layers:
        yield from tensor_chunks(rounded(rewrites.tensor(entry.name), entry))
    elif entry.shape != store.entries[entry.name].shape:
        yield from grown(store, entry)
    else:
        yield from tensor_chunks(rounded(store.read(entry.name), entry))


def record(job: Job, prepared: Prepared, digests: Mapping[str, str]) -> dict[str, Any]:
    """The content of `conversion.json`, verification apart."""
    plan = prepared.plan
    steps = [step for steps in plan.shards.values() for step in steps]
    copied = {step.entry.name: digests[step.entry.name] for step in steps if step.fate == "copied"}
    return {
        "command": job.command,
        "versions": versions(),
        "source": {**job.source.origin, "digest": store_digest(job.source.store, copied)},
        "options": dict(job.options),
        **prepared.observed,
        "tolerance": None if job.tolerance is None else asdict(job.tolerance),
        "counts": describe(plan),
        "tensors": {step.entry.name: {"fate": step.fate, "crc32": digests[step.entry.name]} for step in steps},
        "dropped": {**plan.dropped, **job.source.dropped},
    }
