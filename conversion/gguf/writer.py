"""Writes the tensors of a plan and their metadata as a GGUF file, a few megabytes at a time."""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from crosshead.common.errors import ConversionError
from crosshead.common.progress import Counter, Progress

from ..plan import Plan, Step, produce
from ..sources.tensor_store import DTYPES, tensor_bytes
from ..stages import Request
from ..writing.shard_writer import check_finite, whole_rows
from .metadata import Description, Metadata
from .tensors import ARCHITECTURES, ROPE_FACTORS, Architecture, depth, gguf_name, head_count_key, interleaved

FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q5_1": 9, "q5_0": 8, "q4_1": 3, "q4_0": 2}
"""File type -> its number in `general.file_type`, for all formats that the `gguf` package can quantise to."""
_ADDERS = {str: "add_string", bool: "add_bool", int: "add_uint32", float: "add_float32", list: "add_array"}
"""Type of a metadata value -> method of the `gguf` package's writer that adds it."""
_UNBLOCKED = "F16"
"""Format of a matrix whose row length is not a multiple of the block size of the file's type."""
_ROUTER = "ffn_gate_inp."
"""Part of the names of expert routers, which stay in F32 as in llama.cpp's converter."""
_MAX_SCALE = torch.finfo(torch.float16).max
"""Largest value that can be quantised: the scale of a block is stored as float16."""


@dataclass(frozen=True)
class Target:
    """One tensor of the GGUF file to write."""

    name: str
    format: str
    """Name of a `gguf.GGMLQuantizationType`."""
    shape: tuple[int, ...]
    steps: tuple[Step, ...]
    """Steps of the plan for the stock tensors that it contains, in order: several for a stack of experts."""
    head_rows: int | None
    """Number of rows per head, if the file interleaves the rows of a head; None otherwise."""

    @property
    def size(self) -> int:
        """Size in bytes."""
        block, block_size = block_of(self.format)
        return prod(self.shape) // block * block_size

    @property
    def action(self) -> str:
        """Return "copied" if the file contains the bytes of the source unchanged, otherwise "rewritten"."""
        is_copied = all(step.action == "copied" and step.entry.dtype == self.format for step in self.steps)
        return "copied" if is_copied and self.head_rows is None else "rewritten"


def block_of(form: str) -> tuple[int, int]:
    """Return the number of values in a block of a format, and the size of the block in bytes."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    return GGML_QUANT_SIZES[GGMLQuantizationType[form]]


def default_type(plan: Plan) -> str:
    """Return the dtype that most bytes of a plan have, as a file type; f32 if there is no such type."""
    sizes: dict[str, int] = {}
    for step in plan.steps:
        sizes[step.entry.dtype] = sizes.get(step.entry.dtype, 0) + step.entry.size
    dtype = max(sizes, key=lambda name: sizes[name]).lower()
    return dtype if dtype in FILE_TYPES else "f32"


def plan_targets(plan: Plan, description: Description, type: str) -> list[Target]:
    """Return the tensors of the file in the order of the model, without integer tensors."""
    groups: dict[str, list[Step]] = {}
    for step in sorted(plan.steps, key=_expert):
        if not step.entry.is_integer:
            groups.setdefault(gguf_name(step.entry.name), []).append(step)
    head_size = description.keys[f"{description.architecture}.attention.key_length"]
    return [
        _target(name, groups[name], ARCHITECTURES[description.architecture], head_size, type)
        for name in sorted(groups, key=lambda name: (depth(name), name))
    ]


def _expert(step: Step) -> int:
    """Return the index of the expert in a tensor's name, or 0."""
    _, separator, after = step.entry.name.partition(".experts.")
    return int(after.split(".")[0]) if separator else 0


def _target(name: str, steps: Sequence[Step], family: Architecture, head_size: int, type: str) -> Target:
    shape = steps[0].entry.shape
    form = type.upper()
    if len(shape) < 2 or _ROUTER in name:
        form = "F32"
    elif shape[-1] % block_of(form)[0]:
        form = _UNBLOCKED
    head_rows = head_size if family.interleaved and head_count_key(name) is not None else None
    if len(steps) > 1 or ".experts." in steps[0].entry.name:
        shape = (len(steps), *shape)
    return Target(name, form, shape, tuple(steps), head_rows)


@dataclass(frozen=True)
class Export:
    """The plan of a GGUF file: everything that is known before it is written."""

    request: Request
    plan: Plan
    type: str
    description: Description
    file_metadata: Metadata
    """Metadata about the file and its tokenizer."""
    targets: Sequence[Target]

    @property
    def size(self) -> int:
        """Size of all tensors in bytes."""
        return sum(target.size for target in self.targets)

    def report(self) -> dict[str, Any]:
        """Return the entry `gguf` of the record: file type, architecture, and the format of every tensor.

        "not_quantised" are the matrices that do not have the format of the file's type because of their row length.
        """
        return {
            "type": self.type,
            "architecture": self.description.architecture,
            "not_quantised": [item.name for item in self.targets if item.format == _UNBLOCKED != self.type.upper()],
            "tensors": {target.name: target.format for target in self.targets},
        }


def write_gguf(path: Path, export: Export, progress: Progress) -> tuple[dict[str, str], dict[str, str]]:
    """Write the file and return CRC-32 checksums by stock name.

    The first checksums are those of the planned bytes, as in the record of a folder. The others are those of values
    rounded to the file's format, in stock row order, without quantised tensors.
    """
    import gguf

    description, plan, store = export.description, export.plan, export.request.source.store
    writer, factors = gguf.GGUFWriter(None, description.architecture), description.rope_factors
    for key, value in (export.file_metadata | description.keys).items():
        getattr(writer, _ADDERS[type(value)])(key, value)
    if factors is not None:
        writer.add_tensor_info(ROPE_FACTORS, (len(factors),), np.dtype(np.float32), 4 * len(factors))
    for target in export.targets:
        number = gguf.GGMLQuantizationType[target.format]
        # With np.float32 the shape counts values; with np.uint8 the package would expect a shape in bytes.
        writer.add_tensor_info(target.name, target.shape, np.dtype(np.float32), target.size, raw_dtype=number)
    planned, stored, written = dict[str, str](), dict[str, str](), Counter(progress, "writing", plan.size)
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        files: Any = writer.fout
        file = files[0]
        writer.write_padding(file, file.tell())
        if factors is not None:
            file.write(np.array(factors, dtype="<f4").tobytes())
            writer.write_padding(file, 4 * len(factors))
        for target in export.targets:
            for step in target.steps:
                for block in _encoded(target, step, produce(store, step, plan.rewrites), planned, stored):
                    file.write(block)
                written.add(step.entry.size)
            writer.write_padding(file, target.size)
    finally:
        writer.close()
    return planned, stored


def _encoded(
    target: Target, step: Step, chunks: Iterable[memoryview], planned: dict[str, str], stored: dict[str, str]
) -> Iterator[memoryview]:
    """Yield the bytes of one stock tensor in the format of its target, and add its checksums."""
    entry = step.entry
    columns = entry.shape[-1] if len(entry.shape) > 1 else 1
    row = columns * DTYPES[entry.dtype].itemsize
    planned_crc = stored_crc = 0
    for block in whole_rows(chunks, row * (target.head_rows or 1)):
        check_finite(entry, block)
        planned_crc = zlib.crc32(block, planned_crc)
        rows = torch.frombuffer(block, dtype=DTYPES[entry.dtype]).view(-1, columns)
        if target.format in DTYPES:
            rows = _rounded(rows, entry.name, target.format)
            stored_crc = zlib.crc32(tensor_bytes(rows), stored_crc)
        if target.head_rows is not None:
            rows = interleaved(rows, target.head_rows)
        yield tensor_bytes(rows if target.format in DTYPES else _quantised(rows, entry.name, target.format))
    planned[entry.name] = f"{planned_crc:08x}"
    if target.format in DTYPES:
        stored[entry.name] = f"{stored_crc:08x}"


def _rounded(rows: torch.Tensor, name: str, form: str) -> torch.Tensor:
    result = rows.to(DTYPES[form])
    if not result.isfinite().all():
        raise ConversionError(f"tensor {name} overflows in {form}: use --type bf16 or f32")
    return result


def _quantised(rows: torch.Tensor, name: str, form: str) -> torch.Tensor:
    from gguf import GGMLQuantizationType, quantize

    if rows.abs().max() > _MAX_SCALE:
        raise ConversionError(f"tensor {name} overflows in {form}: use --type bf16 or f32")
    return torch.from_numpy(quantize(rows.float().numpy(), GGMLQuantizationType[form]))
