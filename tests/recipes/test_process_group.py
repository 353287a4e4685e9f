"""At the end of a distributed run, the process group and its threads are gone before the interpreter exits."""

from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from crosshead.recipes.trainer import checkpoints
from crosshead.recipes.trainer.process_group import closing_process_group

TASKS = Path("/proc/self/task")

pytestmark = pytest.mark.skipif(not TASKS.exists(), reason="threads are listed by Linux alone")


def gloo_threads():
    """Return the names of gloo's threads."""
    names = [(task / "comm").read_text().strip() for task in TASKS.iterdir()]
    return [name for name in names if "gloo" in name]


@pytest.fixture
def gloo_group(tmp_path):
    """A gloo process group of one process."""
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


OF_A_STEP = "failed at step 3"


class Trainer:
    """Like transformers' Trainer, it is part of a reference cycle and holds a distributed model."""

    def __init__(self):
        self.itself = self
        self.model = DistributedDataParallel(torch.nn.Linear(4, 4))

    def step(self):
        """Run collectives, which use the threads of the group."""
        self.model(torch.ones(2, 4)).sum().backward()
        distributed.all_reduce(torch.ones(3))


@pytest.mark.parametrize("failure", [None, ValueError, KeyboardInterrupt])
def test_closing_process_group_ends_gloo_threads(failure, gloo_group):
    def run():
        trainer = Trainer()
        trainer.step()
        assert gloo_threads()
        if failure is not None:
            try:
                raise OSError
            except OSError:
                raise failure(OF_A_STEP) from None

    if failure is None:
        with closing_process_group():
            run()
        assert not gloo_threads()
    else:
        with pytest.raises(failure, match=OF_A_STEP):  # the error still exists when threads are counted
            try:
                with closing_process_group():
                    run()
            finally:
                assert not gloo_threads()
    assert not distributed.is_initialized()


def test_only_main_process_writes_run_json(tmp_path, monkeypatch):
    """All processes call this at the same time, so that only the main one may write."""
    checkpoints.claim_output(tmp_path, {"data": "a"})
    before = (tmp_path / "run.json").stat().st_mtime_ns
    monkeypatch.setattr(checkpoints, "is_main_process", lambda: False)
    checkpoints.claim_output(tmp_path, {"data": "b"})
    assert (tmp_path / "run.json").stat().st_mtime_ns == before and not [*tmp_path.glob("*.partial")]
