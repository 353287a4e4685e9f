"""Loads a finished folder in a clean process, without crosshead, network and caches."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.utils.hub import HF_MODULES_CACHE

from crosshead.common.errors import ConversionError
from crosshead.common.free_memory import fits_in_memory

from ..sources.safetensors_store import SafetensorsStore

WORKER = Path(__file__).with_name("reload_worker.py")
NEW_TOKENS = 20


def reload_check(
    folder: Path, tokens: torch.Tensor, expected: Callable[[], torch.Tensor] | None = None
) -> dict[str, Any]:
    """Load a folder, stock or ours, by what it holds alone, and run it on sequences of tokens (B, T).

    Compares its logits with those that `expected` gives (B, T, vocabulary). A model too large for the memory is loaded
    by names and shapes alone: then "checked" says so, and there is no text. `ConversionError` where loading fails.
    """
    entries = SafetensorsStore(folder).entries
    shapes = {name: entry.shape for name, entry in entries.items()}
    whole = fits_in_memory(sum(4 * prod(shape) for shape in shapes.values()))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    with TemporaryDirectory() as scratch:
        logits = Path(scratch, "logits.safetensors")
        job = {
            "folder": str(folder.resolve()),
            "remote_code": "auto_map" in config,
            "shapes": None if whole else shapes,
            "tokens": tokens.tolist(),
            "new_tokens": NEW_TOKENS,
            "threads": torch.get_num_threads(),
            "logits": str(logits),
        }
        found = _run(job, Path(scratch), folder)
        buffers = {name for name, entry in entries.items() if entry.is_integer}
        found["unexpected"] = [name for name in found.get("unexpected", ()) if name not in buffers]
        checked = {"remote_code": job["remote_code"], "checked": "logits and text" if whole else "names and shapes"}
        if whole and expected is not None:
            difference = load_file(logits)["logits"] - expected()
            checked["greatest_logit_difference"] = float(difference.abs().max())
    return checked | found


def agreement(one: list[list[int]], other: list[list[int]]) -> float:
    """The share of equal tokens in two sets of continuations."""
    pairs = [pair for both in zip(one, other, strict=True) for pair in zip(*both, strict=True)]
    return sum(left == right for left, right in pairs) / len(pairs)


def _run(job: dict[str, Any], scratch: Path, folder: Path) -> dict[str, Any]:
    """Run the worker in an isolated interpreter; what it found."""
    request, result, home = scratch / "job.json", scratch / "result.json", str(scratch / "home")
    request.write_text(json.dumps(job | {"result": str(result)}), encoding="utf-8")
    settings = {"HF_HOME": home, "HF_MODULES_CACHE": f"{home}/modules", "HF_HUB_OFFLINE": "1"}
    # The libraries may lie where only this process was told to look: -I, which is cleaner, would not find them.
    settings["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path and path != HF_MODULES_CACHE)
    command = [sys.executable, "-P", str(WORKER), str(request)]
    done = subprocess.run(command, cwd=scratch, env=os.environ | settings, capture_output=True, check=False)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if done.returncode == 1 else f"it ended with status {done.returncode} (out of memory?)"
        raise ConversionError(f"{folder} does not load in a clean process: {reason}")
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found
