"""Runs a conversion in either direction: fit, write, verify, publish."""

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
class Fitted:
    """The result of calibration and fitting: what will be written."""

    config: Any
    """The target's configuration."""
    plan: Plan
    rewrites: LayerRewrites
    observed: Mapping[str, Any]
    """Decisions that depend on the source's outputs for a text, for the record."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A checked conversion, before the source is run or anything is written."""

    command: str
    source: Source
    options: Mapping[str, Any]
    """As given, for the record; together with the source they determine the result."""
    least_bytes: int
    """Minimum size of the result."""
    cached_bytes: int
    """Maximum size of the files that are kept until the result is complete."""
    computes: bool
    """Whether values are computed, and not only copied, created or cast."""
    tolerance: Tolerance | None
    """Maximum difference from the source; None where any difference may be right."""

    def fit(self, keep: Callable[[str], Path], progress: Progress) -> Fitted:
        """Calibrate and fit. `keep` gives the path of a file by its name; a later run of the same request finds it."""
        raise NotImplementedError

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Equal for two runs that would write the same bytes; as JSON."""
        content = {
            "command": self.command,
            "source": self.source.fingerprint,
            "options": dict(self.options),
            "versions": versions(),
            "processor": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads() if self.computes else None,  # they affect rounding
        }
        return json.loads(json.dumps(content))


Verify = Callable[[Request, Path, Progress], dict[str, Any]]
"""Compares a finished folder with the request's source; `ConversionError` where it differs by more than allowed."""


def run(
    request: Request, out: Path, overwrite: bool, restart: bool, verify: Verify | None, progress: Progress
) -> dict[str, Any]:
    """Fit, write, verify and publish; returns the record.

    The target is written beside its place. The files of an unfinished run of the same request are used again, unless
    `restart` discards them.
    """
    out = Path(os.path.expanduser(out))
    for place in request.source.store.places:
        check_apart(place, out)
    with staging(out, request.fingerprint, overwrite, restart) as stage:
        if request.command == "fold":
            check_record(out, overwrite)
        stage.check_room(request.least_bytes, request.cached_bytes)
        fitted = request.fit(stage.keep, progress)
        content = write_model(request, fitted, stage, progress)
        if verify is not None:
            stage.unverified = True
            content["verification"] = verify(request, stage.folder, progress)
            stage.unverified = False
        place = record_file(out, is_stock(fitted))
        write_json(stage.folder / RECORD if place.name == RECORD else stage.beside(place.name), content)
        others = stage.publish()
    return content | {"folder": str(out)} | ({"others": others} if others else {})


def is_stock(fitted: Fitted) -> bool:
    """Whether the target is a stock model."""
    return not hasattr(fitted.config, "mixers")


def write_model(request: Request, fitted: Fitted, stage: Staging, progress: Progress) -> dict[str, Any]:
    """Write weights, tokenizer and configuration; returns the record, without verification."""
    plan = fitted.plan
    stage.expect({file: [step.entry for step in steps] for file, steps in plan.shards.items()})
    digests = write_weights(request.source.store, fitted, stage, progress)
    copy_files(request.source.files, stage.folder)
    forget_loading(stage.folder)
    fitted.config.save_pretrained(stage.folder)
    left_out = drop_tokens(request.source.config, stage.folder)
    if is_stock(fitted):
        add_older_names(stage.folder / CONFIG, fitted.config)
    return record(request, fitted, digests) | {"left_out": left_out}


def write_weights(store: TensorStore, fitted: Fitted, stage: Staging, progress: Progress) -> dict[str, str]:
    """All shards that are not finished yet, then the index; returns every tensor's digest."""
    digests: dict[str, str] = {}
    plan, done, total = fitted.plan, 0, fitted.plan.size  # which takes time where tensors are many
    for file, steps in plan.shards.items():
        if file not in stage.finished:
            written = [done]

            def advance(size: int, written: list[int] = written) -> None:
                written[0] += size
                progress("writing", written[0], total)

            items = [_item(store, step, fitted.rewrites, advance) for step in steps]
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
    if step.action == "copied":
        yield from store.chunks(entry.name)
    elif entry.name in rewrites.layers:
        yield from tensor_chunks(rounded(rewrites.tensor(entry.name), entry))
    elif entry.shape != store.entries[entry.name].shape:
        yield from grown(store, entry)
    else:
        yield from tensor_chunks(rounded(store.read(entry.name), entry))


def record(request: Request, fitted: Fitted, digests: Mapping[str, str]) -> dict[str, Any]:
    """The content of `conversion.json`, verification apart."""
    plan = fitted.plan
    steps = [step for steps in plan.shards.values() for step in steps]
    copied = {step.entry.name: digests[step.entry.name] for step in steps if step.action == "copied"}
    return {
        "command": request.command,
        "versions": versions(),
        "source": {**request.source.origin, "digest": store_digest(request.source.store, copied)},
        "options": dict(request.options),
        **fitted.observed,
        "tolerance": None if request.tolerance is None else asdict(request.tolerance),
        "counts": describe(plan),
        "tensors": {step.entry.name: {"fate": step.action, "crc32": digests[step.entry.name]} for step in steps},
        "dropped": {**plan.dropped, **request.source.dropped},
    }
