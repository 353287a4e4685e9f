"""Measures conversions of a synthetic checkpoint of any size, compared with copying its folder.

usage: python -P -m crosshead.conversion.bench_convert JOB, as JSON; writes seconds and bytes to stdout

Each conversion runs in its own process and is timed inside it, without the start of Python and its libraries. The
values of the weights do not matter as long as they are finite.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import torch
from transformers import LlamaConfig

from crosshead.common.child_process import memory_status, run_child
from crosshead.common.errors import ConversionError
from crosshead.common.progress import silent

from .architectures.families import tensor_shapes
from .convert import convert, resolve
from .options import Options
from .sources.resolve import open_source
from .sources.tensor_store import Entry, shard_names
from .writing.shard_writer import tensor_chunks, write_index, write_shard

SHAPES: tuple[tuple[float, dict[str, Any]], ...] = (
    (4, {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "vocab_size": 32000}),
    (0.5, {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "vocab_size": 32000}),
    (0, {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 16, "vocab_size": 2000}),
)
"""(Minimum gigabytes, config fields), largest first; the number of layers is chosen to match the requested size."""
KEY_VALUE_HEADS = 8
SHARD = 2_000_000_000
"""Maximum size of a shard in bytes."""
DISK_SPACE = 3
"""Required free disk space relative to the checkpoint's size: the checkpoint, its conversion, and the calibration."""
TEXT = "the quick brown fox jumps over the lazy dog. " * 24
"""Calibration text: one window of tokens, because the tokenizer has one token per byte."""
HALF = {"explicit": {"key_heads": "50%", "value_heads": "50%"}}
MIXERS: Mapping[str, dict[str, Any]] = {"neutral": {"knocking": {}}, "calibration": HALF, "virtual-heads": HALF}
"""Benchmark case -> mechanisms."""


@dataclass(frozen=True)
class Synthetic:
    """A synthetic Llama checkpoint in bf16 of about `gigabytes`; `folder` contains it and all other files."""

    folder: Path
    gigabytes: float

    @property
    def source(self) -> Path:
        """Folder of the checkpoint."""
        return self.folder / "source"

    @cached_property
    def config(self) -> Any:
        """Config of the checkpoint."""
        shape = next(shape for minimum, shape in SHAPES if self.gigabytes >= minimum)
        sizes = [sum(entry.size for entry in _entries(_config(shape, layers)).values()) for layers in (1, 2)]
        return _config(shape, 1 + max(0, round((self.gigabytes * 1e9 - sizes[0]) / (sizes[1] - sizes[0]))))

    @property
    def size(self) -> int:
        """Total size of the checkpoint's tensors in bytes."""
        return sum(entry.size for entry in _entries(self.config).values())

    def write(self, write_tokenizer: Callable[[Path], object]) -> None:
        """Write the checkpoint in shards; `ConversionError` if the disk lacks space for it and its conversions."""
        free, needed = shutil.disk_usage(self.folder).free, DISK_SPACE * self.size
        if free < needed:
            raise ConversionError(
                f"{self.folder.parent} needs {needed / 1e9:.3g} GB, but has {free / 1e9:.3g} GB free: name another "
                "folder in TMPDIR, or use a smaller --gigabytes"
            )
        self.source.mkdir()
        self.config.save_pretrained(self.source)
        write_tokenizer(self.source)
        by_name = _entries(self.config)
        shards = {file: [by_name[name] for name in names] for file, names in shard_names(by_name, SHARD).items()}
        for file, entries in shards.items():
            items = [(entry, lambda entry=entry: tensor_chunks(_random(entry))) for entry in entries]
            write_shard(self.source / file, items)
        write_index(self.source, shards)

    def copy(self) -> float:
        """Return the seconds that `cp -r` takes for the checkpoint."""
        out, start = self._fresh("copy"), time.perf_counter()
        run_child(["cp", "-r", str(self.source), str(out)], "cp", ConversionError)
        seconds = time.perf_counter() - start
        self._fresh("copy")
        return seconds

    def convert(self, name: str) -> dict[str, float]:
        """Return seconds and peak memory (bytes) of a conversion, or of its calibration alone."""
        saved = self.folder / "calibration.safetensors"
        if name == "calibration":
            saved.unlink(missing_ok=True)
        elif name == "virtual-heads" and not saved.exists():
            self.convert("calibration")
        job: dict[str, Any] = {
            "name": name,
            "source": str(self.source),
            "saved": str(saved),
            "out": str(self._fresh("out")),
            "mixers": MIXERS[name],
            "threads": torch.get_num_threads(),
        }
        command = [sys.executable, "-P", "-m", __name__, json.dumps(job)]
        output = run_child(command, Path(sys.executable).name, ConversionError)
        self._fresh("out")
        return json.loads(output)

    def _fresh(self, name: str) -> Path:
        """Return a path in the folder after removing its content."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        return self.folder / name


def _config(shape: Mapping[str, Any], layers: int) -> Any:
    config = LlamaConfig(**shape, num_hidden_layers=layers, num_key_value_heads=KEY_VALUE_HEADS, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    return config


def _entries(config: Any) -> dict[str, Entry]:
    return {name: Entry(name, "BF16", shape) for name, shape in tensor_shapes(config).items()}


def _random(entry: Entry) -> torch.Tensor:
    """Return small random values (bf16), seeded by the tensor's name."""
    generator = torch.Generator().manual_seed(crc32(entry.name.encode()))
    return torch.empty(entry.shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)


def main(job: dict[str, Any]) -> dict[str, float]:
    """Run one job (a conversion or its calibration) and return its seconds and peak memory in bytes."""
    torch.set_num_threads(job["threads"])
    saved, text = Path(job["saved"]), Path(job["saved"]).with_name("text.txt")
    text.write_text(TEXT, encoding="utf-8")
    start = time.perf_counter()
    if job["name"] == "calibration":
        with TemporaryDirectory() as scratch:
            request = resolve(
                open_source(job["source"], scratch=Path(scratch)), job["mixers"], Options(calibration=text)
            )
            request.calibrate(saved.parent, silent, dry_run=False)
            saved.with_name("tokens.safetensors").unlink()  # the next calibration tokenises again
    else:
        options: dict[str, Any] = {"calibration": saved} if job["name"] == "virtual-heads" else {}
        convert(job["source"], job["out"], job["mixers"], verify=False, **options)
    # `getrusage` would include the parent's memory before `exec`.
    return {"seconds": time.perf_counter() - start, "peak_bytes": memory_status("VmHWM")}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))))
