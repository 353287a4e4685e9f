"""Two processes under transformers' tensor parallelism give the same logits as one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from toys import BACKBONES, CASES, mixed_config, mixed_model, tokens

WORKER = Path(__file__).with_name("tensor_parallel_worker.py")


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_give_the_same_logits_as_one(tmp_path: Path) -> None:
    expected = {}
    for backbone in BACKBONES:
        for case, mixers in CASES.items():
            model = mixed_model(backbone, mixers, vocab_size=62)  # even, to be split between two processes
            model.save_pretrained(tmp_path / "models" / f"{backbone}-{case}")
            with torch.no_grad():
                expected[f"{backbone}-{case}"] = model(tokens()).logits
    paths = os.pathsep.join(filter(None, [str(WORKER.parents[1]), os.environ.get("PYTHONPATH")]))
    launch = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, str(WORKER), str(tmp_path / "models"), str(tmp_path / "found")],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = torch.load(tmp_path / "found")["models"]
    assert set(results) == set(expected)
    for name, logits in expected.items():
        shared_logits, sharded = results[name]
        assert (shared_logits - logits).abs().max() < 1e-4
        assert sharded and all(parameter.startswith("mlp.") for parameter in sharded), sharded


@pytest.mark.parametrize("backbone", BACKBONES)
def test_tensor_parallel_plan_excludes_attention(backbone: str) -> None:
    plan = mixed_config(backbone, {}).base_model_tp_plan
    assert plan and not any("self_attn" in module for module in plan)
