"""FSDP2 and the Trainer's data parallelism with two gloo ranks, compared with one process on the same batch."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from toys import CASES

WORKER = Path(__file__).with_name("fsdp_worker.py")

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.xdist_group("fsdp")]  # both start once


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """Results of rank 0 for all cases, from one launch of the two ranks."""
    folder = tmp_path_factory.mktemp("fsdp")
    arguments = [sys.executable, "-P", str(WORKER), *(str(folder / name) for name in ("meet", "results", "trainer"))]
    paths = os.pathsep.join(filter(None, [str(WORKER.parents[1]), os.environ.get("PYTHONPATH")]))
    shared = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    shared |= {"MASTER_ADDR": "localhost"}  # accelerate requires it, although the rendezvous is a file
    logs = [folder / f"log-{rank}" for rank in range(2)]
    workers = []
    try:
        for rank, log in enumerate(logs):
            environment = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("w") as output:
                workers.append(subprocess.Popen(arguments, env=environment, stdout=output, stderr=output))
        codes = [worker.wait(timeout=400) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert codes == [0, 0], "\n".join(log.read_text() for log in logs)
    return torch.load(folder / "results")


def one_process_result(results: dict[Any, Any], case: str, parts: int) -> dict[str, Any]:
    """Return the results of one process: on the whole batch, or in parts if there is a balance loss (one per part)."""
    return results["plain", case, parts if "mixture" in CASES[case] else 1]


def assert_same(result: Any, reference: Any) -> None:
    """Assert equality up to the rounding of sums in another order."""
    torch.testing.assert_close(result, reference, rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("checkpointing", (False, True))
def test_fsdp2_equals_one_process(results: dict[Any, Any], case: str, checkpointing: bool) -> None:
    assert_same(results["sharded", case, checkpointing], one_process_result(results, case, parts=2))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("accumulation", (1, 2))
def test_data_parallel_trainer_equals_one_process(results: dict[Any, Any], case: str, accumulation: int) -> None:
    result = results["data parallel", case, accumulation]
    reference = one_process_result(results, case, parts=2 * accumulation)
    assert result["wrapper"] == "DistributedDataParallel"
    assert result["loss"] == pytest.approx(reference["loss"].item(), rel=1e-4)
    assert_same(result["gradients"], reference["gradients"])


def test_sharded_backbone_keeps_balance_loss_or_raises(results: dict[Any, Any]) -> None:
    """transformers records no router scores in a backbone that is itself sharded: an error, or the correct loss."""
    result = results["backbone"]
    if "error" in result:
        assert "head_router_scores" in result["error"]
    else:
        assert_same(result, one_process_result(results, "mixture", parts=2))
