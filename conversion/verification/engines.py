"""Compares a model with its source in a serving engine: vLLM or llama.cpp.

The engine runs in a process of its own, in this Python environment or another one: vLLM pins versions of most of its
dependencies.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from crosshead.common.errors import ConversionError
from crosshead.common.model_location import expand_home
from crosshead.common.progress import Progress, silent

from ..architectures.families import FAMILIES, PREFIX, kind_of
from ..calibration.text import load_tokenizer
from ..fold import fold
from ..sources.model_folder import read_record, record_file, write_json
from ..sources.resolve import Source, open_source
from .engine_worker import MISSING
from .reload import agreement, empty_cache
from .verify import folder_of, read_sample, refuse_foreign_code

ENGINES = {"vllm": "vllm", "llama.cpp": "llama-cpp-python"}
"""Engine -> the package that provides it."""
WORKER = Path(__file__).with_name("engine_worker.py")
PROMPTS, PROMPT_LENGTH, NEW_TOKENS = 4, 64, 64
LLAMA_CPP_CACHE = re.compile(r"size = +([\d.]+) MiB \( *(\d+) cells")
"""Matches the size of a KV cache and its number of tokens (cells) in llama.cpp's log."""
LLAMA_CPP_ERROR = re.compile(r"error loading model: (?:error loading model )?(.+)")
"""Matches the reason of an error in llama.cpp's log."""
HIDDEN = ("PYTHONPATH", "PYTHONHOME")
"""Environment variables of this process that must not reach another interpreter."""


def verify_in_engine(
    source: str | Path,
    model: str | Path,
    engine: str,
    *,
    python: str | Path | None = None,
    revision: str | None = None,
    text: str | Path | None = None,
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Run a model and its source in an engine, and return the report, which is also added to the conversion's record.

    vLLM runs folders. llama.cpp runs GGUF files, to which folders are folded first. `python` is the interpreter of the
    environment with the engine.
    """
    if engine not in ENGINES:
        raise ConversionError(f"--engine {engine} is not known: use {' or '.join(ENGINES)}")
    with tempfile.TemporaryDirectory() as scratch:
        checkpoints = {
            "source": open_source(source, revision, scratch=Path(scratch, "source"), further_files=["*.py"]),
            "model": open_source(model, scratch=Path(scratch, "model"), further_files=["*.py"]),
        }
        _check_decoder(checkpoints["source"], engine)
        sample = read_sample(checkpoints["source"], None if text is None else expand_home(text))
        prompts = sample.tokens[:PROMPTS, :PROMPT_LENGTH].tolist()
        results = {}
        for done, (role, checkpoint) in enumerate(checkpoints.items(), 1):
            if not trust_remote_code:
                refuse_foreign_code(checkpoint)
            model_path = _runnable(checkpoint, engine, Path(scratch, role))
            config = checkpoint.config if engine == "vllm" else {}  # llama.cpp's cache is float16 by default
            results[role] = run_engine(engine, model_path, prompts, config, python)
            texts = [load_tokenizer(checkpoint).decode(tokens) for tokens in results[role]["tokens"]]
            results[role]["greedy_text"] = texts[0]
            progress(f"running in {engine}", done, len(checkpoints), role)
    report = compared(results) | {"text": sample.text}
    path = folder_of(checkpoints["model"]) or Path(model)
    record_path = record_file(path, kind_of(checkpoints["model"].config) == "stock")
    if checkpoints["model"].origin["kind"] != "hub" and (record := read_record(record_path)):
        with suppress(OSError):  # a published folder may be read-only
            write_json(record_path, record | {"engines": record.get("engines", {}) | {engine: report}})
    return {"engine": {"name": engine, **report}}


def _check_decoder(source: Source, engine: str) -> None:
    """Refuse a model that does not predict the next token of a text."""
    model_type = str(source.config.get("model_type"))
    family = FAMILIES.get(model_type.removeprefix(PREFIX))
    if family is not None and family.is_encoder:
        raise ConversionError(
            f"--engine {engine} compares causal language models, and {source.origin['name']} has model_type="
            f"{model_type!r}: leave --engine out"
        )


def compared(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the measurements of both models side by side."""
    report: dict[str, Any] = {"version": results["model"]["version"]}
    logprobs = {role: [*chain.from_iterable(result["logprobs"])] for role, result in results.items()}
    for role, result in results.items():
        numbers = {name: result[name] for name in ("kv_bytes_per_token", "kv_cache_tokens", "tokens_per_second")}
        report[role] = {"loss": -fmean(logprobs[role]), **numbers, "greedy_text": result["greedy_text"]}
    return report | {
        "greatest_logprob_difference": max(abs(one - other) for one, other in zip(*logprobs.values(), strict=True)),
        "greedy_agreement": agreement(*(result["tokens"] for result in results.values())),
    }


def run_engine(
    engine: str, model: Path, prompts: list[list[int]], config: Mapping[str, Any], python: str | Path | None = None
) -> dict[str, Any]:
    """Run a model in an engine and return the results of `engine_worker.py`.

    The model in vLLM, or the KV cache in llama.cpp, has the dtype in `config`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        job, result = Path(scratch, "job.json"), Path(scratch, "result.json")
        content = {
            "engine": engine,
            "model": str(model.resolve()),
            "prompts": prompts,
            "new_tokens": NEW_TOKENS,
            "remote_code": "auto_map" in config,
            "dtype": config.get("dtype") or config.get("torch_dtype") or "auto",
            "result": str(result),
        }
        job.write_text(json.dumps(content), encoding="utf-8")
        interpreter = os.path.abspath(expand_home(python or sys.executable))
        environment = {name: value for name, value in os.environ.items() if python is None or name not in HIDDEN}
        environment |= empty_cache(Path(scratch, "home"))
        command = [interpreter, "-P", str(WORKER), str(job)]
        try:
            process = subprocess.run(
                command, cwd=scratch, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False
            )
        except OSError as error:
            raise ConversionError(f"--engine-python {interpreter} cannot be started: {error.strerror}") from error
        log = process.stderr.decode(errors="replace")
        if process.returncode == MISSING:
            raise ConversionError(
                f"{engine} is not installed for {interpreter}: run `pip install {ENGINES[engine]}`, or name the "
                "interpreter of another environment with --engine-python"
            )
        if process.returncode:
            lines = LLAMA_CPP_ERROR.findall(log) or [line for line in log.splitlines() if line.strip()]
            reason = lines[-1] if lines else f"it ended with status {process.returncode}"
            raise ConversionError(f"{engine} cannot run {model}: {reason}")
        report: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    if engine == "llama.cpp":
        sizes = [(float(size) * 2**20 / int(cells)) for size, cells in LLAMA_CPP_CACHE.findall(log)]
        report["kv_bytes_per_token"] = sum(sizes) if sizes else None
    return report


def _runnable(checkpoint: Source, engine: str, scratch: Path) -> Path:
    """Return the folder or file that the engine loads; for llama.cpp, a folder is folded to a GGUF file."""
    folder = folder_of(checkpoint)
    if engine == "vllm":
        if folder is None:
            raise ConversionError(
                f"vllm runs model folders, and {checkpoint.origin['name']} is a GGUF file: give its folder"
            )
        return folder
    if folder is None:
        return checkpoint.store.paths[0]
    fold(folder, scratch / "model.gguf", verify=False)
    return scratch / "model.gguf"
