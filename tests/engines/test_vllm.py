"""vLLM on the CPU generates the same with our models as transformers; `make test-vllm` installs it and runs this."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from vllm_models import CASES, REFUSED, SPLIT, write_model

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build" / "vllm" / "bin" / "python"
TOLERANCE = 1e-3
"""Maximum absolute error of a log-probability."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.is_file(), reason="vLLM is not installed: `make test-vllm` does it"),
]
RUNS = [(name, mode, 1) for name in CASES for mode in ("eager", "compiled")] + [(name, "eager", 2) for name in SPLIT]


def run_vllm_worker(folder: Path, mode: str, processes: int) -> subprocess.CompletedProcess[str]:
    """Run vllm_worker.py in vLLM's environment, outside the repository and without crosshead."""
    worker = Path(__file__).with_name("vllm_worker.py")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [PYTHON, str(worker), str(folder), mode, str(processes)],
        cwd=folder.parent,
        env=environment | {"HF_MODULES_CACHE": str(folder.parent / "modules"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.parametrize(("name", "mode", "processes"), RUNS, ids=lambda value: str(value))
def test_vllm_gives_same_tokens_and_logprobs(name: str, mode: str, processes: int, tmp_path: Path) -> None:
    write_model(name, tmp_path / name)
    done = run_vllm_worker(tmp_path / name, mode, processes)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    results: list[dict[str, Any]] = json.loads(lines[-1].removeprefix("RESULT "))
    for ours, expected in zip(results, json.loads((tmp_path / name / "expected.json").read_text()), strict=True):
        assert ours["tokens"] == expected["tokens"]
        assert ours["logprobs"] == pytest.approx(expected["logprobs"], abs=TOLERANCE)


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_mechanisms_are_refused(name: str, tmp_path: Path) -> None:
    write_model(name, tmp_path / name)
    (tmp_path / name / "expected.json").write_text(json.dumps([{"prompt": [1, 2], "tokens": [3]}]))
    done = run_vllm_worker(tmp_path / name, "eager", 1)
    assert done.returncode != 0
    assert re.search(f"attn_implementation='vllm' is not allowed: .*'{name}'", done.stdout + done.stderr)
