"""`crosshead eval --backend vllm` gives the scores of transformers; `make test-vllm` installs vLLM and runs this."""

import json
import os
import subprocess
from pathlib import Path

import pytest

import crosshead
import toys
from crosshead.evals.harness.evaluate import evaluate
from toy_eval import write_scorable

PYTHON = Path(__file__).parents[2] / "build" / "vllm" / "bin" / "python"
SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "hidden_size": 64}
MIXERS = {"explicit": {"norm": False, "key_heads": 2, "value_heads": 2}}
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.is_file(), reason="vLLM is not installed: `make test-vllm` does it"),
]


def test_vllm_scores_equal_transformers_scores(tmp_path: Path) -> None:
    """A folded model runs in vLLM's own Llama class, and the unfolded model with remote code."""
    model, folded = tmp_path / "model", tmp_path / "folded"
    write_scorable(toys.mixed_model("Llama", MIXERS, max_position_embeddings=1024, **SIZES), model)
    crosshead.fold(model, folded, keep_cache=True, verify=False)
    expected = evaluate([str(folded), str(model)], "offline", limit=6)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | SETTINGS
    command = [PYTHON, "-P", "-m", "crosshead", "eval", folded, model, "--suite", "offline", "--limit", "6"]
    options = ["--backend", "vllm", "--trust-remote-code", "--out", tmp_path / "eval.json"]
    done = subprocess.run(
        [*map(str, command), *map(str, options)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-6000:]
    report = json.loads((tmp_path / "eval.json").read_text())
    assert report["backend"] == "vllm"
    for scored, reference in zip(report["models"], expected["models"], strict=True):
        assert (scored["dtype"], scored["parameters"]) == ("float32", reference["parameters"])
        assert [row["score"] for row in scored["scores"]] == pytest.approx(
            [row["score"] for row in reference["scores"]], rel=1e-2
        )
