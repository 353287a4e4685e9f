"""Killed and distributed runs in real processes; `make measure-resume` does the same at length."""

import pytest

from measure import processes, resume

pytestmark = pytest.mark.slow


def test_killed_run_has_same_losses_batches_and_weights(tmp_path):
    recipe = resume.two_epochs(tmp_path, documents=40)
    report = resume.killed(recipe, tmp_path, kills=2, processes=1, seed=0)
    steps = recipe.steps
    assert report == {
        "processes": 1,
        "steps": steps,
        "kills": 2,
        "steps_with_several_losses": 0,
        "losses_compared": steps,
        "losses_different": 0,
        "weights_equal": True,
        "batches_compared": steps,
        "batches_different": 0,
    }


@pytest.mark.distributed
def test_killed_run_of_two_processes_resumes_identically(tmp_path):
    recipe = resume.two_epochs(tmp_path, documents=40)
    report = resume.killed(recipe, tmp_path, kills=2, processes=2, seed=1)
    assert report["kills"] == 2 and report["weights_equal"]
    assert report["losses_different"] == report["batches_different"] == report["steps_with_several_losses"] == 0
    assert report["losses_compared"] == recipe.steps


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["mixture", "documents apart", "order of segments"])
def test_losses_do_not_depend_on_number_of_processes(name, tmp_path):
    report = processes.compared(processes.recipes(tmp_path, steps=50)[name], tmp_path / "runs", name)
    assert report["steps"] == 50
    assert max(report["greatest_difference_of_losses"].values()) < 1e-5
    assert max(report["greatest_difference_of_held_out_losses"].values()) < 1e-5
