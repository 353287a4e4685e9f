"""The stages of a conversion in either direction: calibrate and fit, plan, write, verify, publish.

`convert.resolve` and `fold.resolve` check the user's request and return a `Request`; `run` executes it.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from transformers import GenerationConfig

from crosshead.common.errors import ConversionError, one_line
from crosshead.common.model_location import expand_home
from crosshead.common.progress import Counter, Progress

from .architectures.families import family_of
from .compress.layer_rewrites import LayerRewrites
from .plan import Plan, Step, produce
from .sources.model_folder import (
    CONFIG,
    GENERATION_CONFIG,
    RECORD,
    add_legacy_fields,
    check_record,
    copy_files,
    record_file,
    remove_access_tokens,
    remove_loading_arguments,
    store_digest,
    versions,
    write_json,
)
from .sources.resolve import Source
from .sources.safetensors_store import WEIGHTS
from .sources.tensor_store import TensorStore
from .verification.tolerances import Tolerance
from .verification.verify import kv_cache_bytes, read_sample, verify_folder
from .writing.atomic_output import AtomicOutput, atomic_output, check_apart, check_target
from .writing.loader_classes import write_loader_class
from .writing.shard_writer import write_index, write_shard


@dataclass(frozen=True, kw_only=True)
class Request:
    """A validated conversion request; the source has not run and nothing has been written."""

    command: str
    source: Source
    source_config: Any
    options: Mapping[str, Any]
    """Options stored in conversion.json; together with the source they determine the result."""
    minimum_bytes: int
    """Lower bound of the result's size in bytes, for the check of free disk space."""
    cached_bytes: int
    """Upper bound, in bytes, of temporary files (the calibration) that exist until the result is complete."""
    computes: bool
    """True if tensor values are computed, not only copied, initialised or cast."""
    tolerance: Tolerance | None
    """Maximum difference between outputs of result and source; None if any difference is allowed."""
    device: str = "cpu"
    """Device on which models run."""

    def calibrate(self, cache: Path, progress: Progress, dry_run: bool) -> Self:
        """Run the source on the calibration input if the result depends on it; return the request with the results.

        Files in the folder `cache` are reused. A dry run skips statistics that the plan does not need.
        """
        return self

    def plan(self) -> Plan:
        """Return the plan: the target's config and an action for every tensor."""
        raise NotImplementedError

    @property
    def fingerprint(self) -> dict[str, Any]:
        """JSON object that is equal for two runs that would write the same bytes; an unfinished run resumes by it."""
        content = {
            "command": self.command,
            "source": self.source.fingerprint,
            "options": dict(self.options),
            "versions": versions(),
            "processor": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads() if self.computes else None,  # they affect rounding
        }
        return json.loads(json.dumps(content))


def run(
    request: Request, out: Path, *, overwrite: bool, restart: bool, verify: bool, plan_only: bool, progress: Progress
) -> dict[str, Any]:
    """Run all stages and return the record; with `plan_only`, return the report of a dry run and write nothing.

    The target is prepared in a working directory. The files of an unfinished run of the same request are reused,
    unless `restart` discards them.
    """
    source, out = request.source, expand_home(out)
    generation = generation_settings(source, request.source_config)
    check_apart(source.store.paths, out)
    if plan_only:
        check_target(out, overwrite)
        if request.command == "fold":
            check_record(out, overwrite)
        with tempfile.TemporaryDirectory() as scratch:
            return plan_report(request, request.calibrate(Path(scratch), progress, dry_run=True).plan())
    sample = read_sample(source, None) if verify else None  # before all work: it fails on a broken tokenizer
    with atomic_output(out, request.fingerprint, overwrite, restart) as output:
        if request.command == "fold":
            check_record(out, overwrite)
        output.check_space(request.minimum_bytes, request.cached_bytes)
        request = request.calibrate(output.work, progress, dry_run=False)
        plan = request.plan()
        digests, left_out = write_model(source, plan, output, generation, progress)
        content = record(request, plan, digests) | {"left_out": left_out}
        if sample is not None:
            content["verification"] = verify_folder(
                source, output.folder, sample, request.tolerance, progress, request.device
            )
        path = record_file(out, plan.is_stock)
        write_json(output.folder / RECORD if path.name == RECORD else output.sibling(path.name), content)
        others = output.publish()
    return content | {"folder": str(out)} | ({"others": others} if others else {})


def generation_settings(source: Source, config: Any) -> dict[str, Any]:
    """Return the generation settings in a source's config.json if `config`, which was read from it, lacks some.

    Older models have them there and not in generation_config.json. transformers applies, but does not save them.
    """
    classes = source.config.get("architectures") or [family_of(config).architecture]
    generates = not family_of(config).is_encoder or str(classes[0]).endswith("ForConditionalGeneration")
    if not generates or GENERATION_CONFIG in (file.name for file in source.files):
        return {}
    try:
        settings, kept = (
            GenerationConfig.from_model_config(dict(content)).to_diff_dict()
            for content in (source.config, config.to_dict())
        )
    except Exception as error:  # as in read_config
        raise ConversionError(f"config.json of {source.label} cannot be used: {one_line(error)}") from error
    return {} if settings == kept else dict(sorted(settings.items()))


def write_model(
    source: Source, plan: Plan, output: AtomicOutput, generation: Mapping[str, Any], progress: Progress
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Write all files; return tensor name -> CRC-32, and per file the JSON keys that contained access tokens."""
    output.expect({file: [step.entry for step in steps] for file, steps in plan.shards.items()})
    digests = write_weights(source.store, plan, output, progress)
    copy_files(source.files, output.folder)
    remove_loading_arguments(output.folder)
    if not plan.is_stock:
        write_loader_class(source, output.folder)
    plan.config.save_pretrained(output.folder)
    if generation:
        write_json(output.folder / GENERATION_CONFIG, generation)
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


def plan_report(request: Request, plan: Plan) -> dict[str, Any]:
    """Return the report of a dry run: the summary, sizes in bytes, and action, dtype and shape of every tensor."""
    entries = {step.entry.name: step.entry for step in plan.steps}
    return summary(request, plan) | {
        "bytes": plan.size,
        "kv_bytes_per_token_before": kv_cache_bytes(request.source_config, request.source.store.entries),
        "kv_bytes_per_token_after": kv_cache_bytes(plan.config, entries),
        "tensors": {
            step.entry.name: {"fate": step.action, "dtype": step.entry.dtype, "shape": list(step.entry.shape)}
            for step in plan.steps
        },
    }


def summary(request: Request, plan: Plan) -> dict[str, Any]:
    """Return the fields that are common to the report of a dry run and the record."""
    return {
        "command": request.command,
        "source": request.source.origin,
        "options": dict(request.options),
        **plan.decisions,
        "counts": plan.counts,
        "dropped": {**plan.dropped, **request.source.dropped},
    }


def record(request: Request, plan: Plan, digests: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of `conversion.json`, without the verification."""
    content = summary(request, plan)
    copied = {step.entry.name: digests[step.entry.name] for step in plan.steps if step.action == "copied"}
    return content | {
        "versions": versions(),
        "source": content["source"] | {"digest": store_digest(request.source.store, copied)},
        "tolerance": None if request.tolerance is None else asdict(request.tolerance),
        "tensors": {step.entry.name: {"fate": step.action, "crc32": digests[step.entry.name]} for step in plan.steps},
    }
