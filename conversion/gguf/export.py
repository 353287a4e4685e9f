"""Folds a model to a GGUF file: plans it, writes it, reads it back, compares it with the source, and publishes it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from crosshead.common.errors import ConversionError
from crosshead.common.model_location import expand_home
from crosshead.common.progress import Progress

from ..architectures.families import PREFIX, family_of, read_config
from ..calibration.text import load_tokenizer
from ..plan import Plan
from ..sources.model_folder import check_record, record_file, write_json
from ..sources.resolve import Source
from ..sources.tensor_store import DTYPES
from ..stages import Request, plan_report, record
from ..verification.tolerances import Tolerance, check_equal, tolerance
from ..verification.verify import Sample, measure_logits, read_sample
from ..writing.atomic_file import atomic_file, check_file
from ..writing.atomic_output import check_apart, check_free
from ..writing.shard_writer import digest_of
from .header import MAGIC
from .metadata import NAMES, Metadata, describe
from .store import GgufStore, require_gguf
from .tokenizer import tokenizer_metadata
from .writer import FILE_TYPES, Export, Target, default_type, plan_targets, write_gguf

SUFFIX = ".gguf"
_QUANTISATION_VERSION = 2
"""Version of the quantised block formats that the `gguf` package writes."""


def check_type(out: Path, type: str | None) -> bool:
    """Return True if `out` names a GGUF file; `ConversionError` for an unknown type, or for a type and a folder."""
    if type is not None and type not in FILE_TYPES:
        raise ConversionError(f"--type {type!r} cannot be written: use one of {', '.join(FILE_TYPES)}")
    if out.suffix.lower() == SUFFIX:
        require_gguf()
        return True
    if type is not None:
        raise ConversionError(
            f"--type {type} is for GGUF files, and {out} is a folder: use a name that ends in {SUFFIX}"
        )
    return False


def run_gguf(
    request: Request,
    out: Path,
    type: str | None,
    *,
    overwrite: bool,
    verify: bool,
    plan_only: bool,
    progress: Progress,
) -> dict[str, Any]:
    """Write the stock model of a request as a GGUF file. Return the record, or the plan with `plan_only`."""
    if family_of(request.source_config).is_encoder:
        raise ConversionError(f"{out} is a GGUF file, which holds decoders only: name a folder for this encoder")
    if (model_type := request.source_config.model_type.removeprefix(PREFIX)) not in NAMES:
        raise ConversionError(
            f"{out} is a GGUF file, and crosshead writes none for a model of type {model_type!r}: name a folder, and "
            "convert that with llama.cpp"
        )
    out = expand_home(out)
    check_apart(request.source.store.paths, out)
    if plan_only:
        check_file(out, MAGIC, overwrite)
        check_record(out, overwrite)
        return _plan_report(_prepare(request, type))
    with atomic_file(out, record_file(out, stock=True), MAGIC, overwrite) as (path, record_path):
        check_record(out, overwrite)
        export = _prepare(request, type)
        sample = read_sample(request.source, None) if verify else None
        check_free(path.parent, out, export.size)
        planned, stored = write_gguf(path, export, progress)
        content = record(export.request, export.plan, planned) | {"gguf": export.report()}
        if sample is not None:
            content["verification"] = _verify(export, path, stored, sample, progress)
        write_json(record_path, content)
    return content | {"folder": str(out)}


def _prepare(request: Request, type: str | None) -> Export:
    """Plan the file, and check everything that can be checked before it is written."""
    plan, source = request.plan(), request.source
    integers = [step.entry.name for step in plan.steps if step.entry.is_integer]
    dropped = plan.dropped | dict.fromkeys(integers, "a GGUF file holds no integer tensors of this model")
    shards = {file: [step for step in steps if not step.entry.is_integer] for file, steps in plan.shards.items()}
    plan = replace(plan, dropped=dropped, shards=shards)
    type = type or default_type(plan)
    description = describe(plan.config)
    file_metadata: Metadata = {
        "general.type": "model",
        "general.name": Path(source.origin["name"]).name,
        "general.file_type": FILE_TYPES[type],
        **tokenizer_metadata(load_tokenizer(source), plan.config, source.origin["name"]),
    }
    targets = plan_targets(plan, description, type)
    is_quantised = not {target.format for target in targets} <= DTYPES.keys()
    if is_quantised:
        file_metadata["general.quantization_version"] = _QUANTISATION_VERSION
    allowed = None if is_quantised else _tolerance(plan, targets)
    request = replace(request, options={**request.options, "type": type}, tolerance=allowed)
    return Export(request, plan, type, description, file_metadata, targets)


def _tolerance(plan: Plan, targets: Sequence[Target]) -> Tolerance:
    rounded = {step.entry.dtype for step in plan.steps if step.action == "rewritten"}
    rounded |= {target.format for target in targets if {step.entry.dtype for step in target.steps} != {target.format}}
    return tolerance(plan.config, {"F32"} | rounded)


def _plan_report(export: Export) -> dict[str, Any]:
    tensors = {
        target.name: {"fate": target.action, "dtype": target.format, "shape": list(target.shape)}
        for target in export.targets
    }
    report = plan_report(export.request, export.plan)
    return report | {"bytes": export.size, "tensors": tensors, "gguf": export.report()}


def _verify(
    export: Export, path: Path, digests: Mapping[str, str], sample: Sample, progress: Progress
) -> dict[str, Any]:
    """Read the file back and measure it; metadata, names, shapes, unquantised values and logits must agree.

    `digests` are the checksums of the unquantised values, by stock name.
    """
    store = GgufStore(path)
    name = path.name
    config = read_config(store.config, "stock", name)
    if differ := export.description.differences(describe(config)):
        raise ConversionError(f"{name} reads back with another {differ[0]}; please report this")
    planned = {step.entry.name: step.entry.shape for step in export.plan.steps}
    read = {stock: entry.shape for stock, entry in store.entries.items()}
    if differ := sorted({stock for stock, _ in planned.items() ^ read.items()}):
        raise ConversionError(f"{name} reads back with another name or shape of {differ[0]}; please report this")
    for stock, digest in digests.items():
        if digest_of(store.chunks(stock)) != digest:
            raise ConversionError(f"{name} reads back with other values of {stock}; please report this")
    written = Source(store, store.config, [], {"kind": "gguf", "name": name}, "", store.dropped)
    measured = measure_logits(export.request.source, written, sample, export.request.tolerance, progress)
    check_equal(measured, export.request.tolerance)
    return measured
