"""How long a conversion takes and how much memory, on a synthetic checkpoint of any size.

usage: python -P tests/measure/streaming.py FOLDER [--gigabytes 8] [--rounds 3]

Makes a Llama-shaped bf16 checkpoint in shards of 2 GB in FOLDER (needs three times its size there), then in turn
copies it with `cp -r` and converts it, each as a process of its own, with the operating system's count of peak memory.
`seconds` is the call of `convert`, `process_seconds` includes starting Python and importing torch and transformers.
Then virtual heads from a calibration that was saved before. One JSON document on stdout. Times say something only on
a machine that does nothing else.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from crosshead.conversion.families import stock_shapes
from crosshead.conversion.shard_writer import tensor_chunks, write_index, write_shard
from crosshead.conversion.store import Entry
from toy_checkpoints import character_tokenizer

SHARD = 2_000_000_000
SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
LAYER_BYTES = 436_000_000
WORKER = """
import json, sys, time
import crosshead
source, out, mixers, options = json.loads(sys.argv[1])
start = time.perf_counter()
crosshead.convert(source, out, mixers, verify=False, **options)
print(time.perf_counter() - start)
"""


def make_checkpoint(folder: Path, gigabytes: float) -> None:
    """Random weights; the values do not matter, only that they are finite."""
    folder.mkdir(parents=True)
    config = LlamaConfig(num_hidden_layers=max(round((gigabytes * 1e9 - 5e8) / LAYER_BYTES), 1), **SIZES)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    groups: list[list[Entry]] = [[]]
    for name, shape in stock_shapes(config).items():
        entry = Entry(name, "BF16", shape)
        if sum(other.size for other in groups[-1]) + entry.size > SHARD:
            groups.append([])
        groups[-1].append(entry)
    shards = {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}
    for file, entries in shards.items():
        write_shard(folder / file, [(entry, lambda entry=entry: tensor_chunks(random(entry))) for entry in entries])
    write_index(folder, shards)


def random(entry: Entry) -> torch.Tensor:
    """Small values, different for each tensor."""
    generator = torch.Generator().manual_seed(sum(entry.name.encode()))
    return torch.empty(entry.shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)


def run(command: list[str]) -> dict[str, float]:
    """Seconds of one process, peak resident megabytes, and what it says itself."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    said = process.stdout.read()  # type: ignore[union-attr]
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}")
    seconds = time.perf_counter() - start
    return {"seconds": float(said or seconds), "process_seconds": seconds, "peak_mb": usage.ru_maxrss / 1024}


def convert(source: Path, mixers: dict[str, Any], **options: str) -> dict[str, float]:
    """One conversion in a process of its own."""
    out = fresh(source.with_name("out"))
    measured = run([sys.executable, "-P", "-c", WORKER, json.dumps([str(source), out, mixers, options])])
    fresh(source.with_name("out"))
    return measured


def fresh(folder: Path) -> str:
    """A path where nothing is."""
    shutil.rmtree(folder, ignore_errors=True)
    return str(folder)


def compare(source: Path, rounds: int) -> dict[str, Any]:
    """`cp -r` and a neutral conversion in turn."""
    copies, conversions = [], []
    for _ in range(rounds):
        copies.append(run(["cp", "-r", str(source), fresh(source.with_name("copy"))]))
        fresh(source.with_name("copy"))
        conversions.append(convert(source, {"knocking": {}}))
    ratios = [made["seconds"] / copied["seconds"] for made, copied in zip(conversions, copies, strict=True)]
    return {"cp": copies, "neutral": conversions, "ratios": ratios, "median_ratio": statistics.median(ratios)}


def virtual_heads(source: Path) -> dict[str, Any]:
    """Half the component heads in two layers, from a calibration saved by an earlier run.

    One layer is in memory at a time, so that more of them take more time and no more memory.
    """
    text, saved = source.with_name("text.txt"), source.with_name("calibration.safetensors")
    text.write_text("the quick brown fox jumps over the lazy dog. " * 12)
    mixers = {"explicit": {"key_heads": "50%", "value_heads": "50%", "layers": [0, 1]}}
    made = convert(source, mixers, calibration=str(text), save_calibration=str(saved))
    again = convert(source, mixers, calibration=str(saved))
    return {"with_calibration": made, "from_saved_calibration": again, "calibration_mb": saved.stat().st_size / 2**20}


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    source = arguments.folder / "source"
    make_checkpoint(source, arguments.gigabytes)
    size = sum(file.stat().st_size for file in source.iterdir())
    result = {"bytes": size, "cores": os.cpu_count(), "torch": torch.__version__}
    result |= compare(source, arguments.rounds)
    result |= virtual_heads(source)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
