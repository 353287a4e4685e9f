"""Loads a finished folder in a clean process: without crosshead, without network and without caches."""

import json
import os
import subprocess
import sys
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.utils.hub import HF_MODULES_CACHE

from crosshead.common.errors import ConversionError, temporary_files
from crosshead.common.free_memory import fits_in_memory

from ..sources.model_folder import code_references
from ..sources.safetensors_store import SafetensorsStore

WORKER = Path(__file__).with_name("reload_worker.py")
NEW_TOKENS = 20


def reload_check(
    folder: Path, tokens: torch.Tensor, auto_class: str = "AutoModelForCausalLM"
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Load a stock or crosshead folder from its own files alone, and run it on tokens (B, T) or pixel values.

    Return a report, and the logits or an encoder's last hidden states. If the model does not fit in memory, only names
    and shapes are loaded; "checked" in the report says so. `ConversionError` if loading fails.
    """
    entries = SafetensorsStore(folder).entries
    shapes = {name: entry.shape for name, entry in entries.items()}
    fits = fits_in_memory(sum(4 * prod(shape) for shape in shapes.values()))
    with temporary_files(), TemporaryDirectory() as scratch:
        logits, inputs = Path(scratch, "logits.safetensors"), Path(scratch, "inputs.safetensors")
        save_file({"inputs": tokens.contiguous()}, inputs)
        job = {
            "folder": str(folder.resolve()),
            "auto_class": auto_class,
            "remote_code": bool(code_references(folder)),
            "shapes": None if fits else shapes,
            "inputs": str(inputs),
            "new_tokens": NEW_TOKENS,
            "threads": torch.get_num_threads(),
            "logits": str(logits),
        }
        result = _run(job, Path(scratch), folder)
        buffers = {name for name, entry in entries.items() if entry.is_integer}
        result["unexpected"] = [name for name in result.get("unexpected", ()) if name not in buffers]
        report = {"remote_code": job["remote_code"], "checked": "logits and text" if fits else "names and shapes"}
        outputs = load_file(logits)["logits"] if fits else None
    return report | result, outputs


def agreement(one: list[list[int]], other: list[list[int]]) -> float:
    """Return the fraction of equal tokens in two sets of continuations."""
    pairs = [pair for both in zip(one, other, strict=True) for pair in zip(*both, strict=True)]
    return sum(left == right for left, right in pairs) / len(pairs)


def empty_cache(home: Path) -> dict[str, str]:
    """Return environment variables for a process that finds no code or models in the user's cache of the Hub."""
    hub = str(home / "hub")
    settings = {"HF_HOME": str(home), "HF_MODULES_CACHE": str(home / "modules"), "HF_HUB_OFFLINE": "1"}
    return settings | {"HF_HUB_CACHE": hub, "HUGGINGFACE_HUB_CACHE": hub}


def _run(job: dict[str, Any], scratch: Path, folder: Path) -> dict[str, Any]:
    """Run the worker in an isolated interpreter, and return its result."""
    request, result = scratch / "job.json", scratch / "result.json"
    request.write_text(json.dumps(job | {"result": str(result)}), encoding="utf-8")
    settings = empty_cache(scratch / "home")
    # This process may have found its libraries through a changed sys.path, which the stricter option -I would ignore.
    settings["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path and path != HF_MODULES_CACHE)
    command = [sys.executable, "-P", str(WORKER), str(request)]
    worker = subprocess.run(
        command, cwd=scratch, env=os.environ | settings, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    if worker.returncode:
        lines = worker.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if worker.returncode == 1 else f"it ended with status {worker.returncode} (out of memory?)"
        raise ConversionError(f"{folder} does not load in a clean process: {reason}")
    return json.loads(result.read_text(encoding="utf-8"))
