"""Real processes that are killed, and several that share a step; `make measure-resume` does the same at length."""

import pytest

from measure import processes, resume

pytestmark = pytest.mark.slow


def test_a_run_that_is_killed_ends_as_one_that_is_not(tmp_path):
    recipe = resume.two_epochs(tmp_path, documents=40)
    found = resume.killed(recipe, tmp_path, kills=2, processes=1, seed=0)
    steps = recipe.steps
    assert found == {
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
def test_two_processes_that_are_killed(tmp_path):
    recipe = resume.two_epochs(tmp_path, documents=40)
    found = resume.killed(recipe, tmp_path, kills=2, processes=2, seed=1)
    assert found["kills"] == 2 and found["weights_equal"]
    assert found["losses_different"] == found["batches_different"] == found["steps_with_several_losses"] == 0
    assert found["losses_compared"] == recipe.steps


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["mixture", "documents apart", "order of segments"])
def test_a_step_is_the_same_however_it_is_divided(name, tmp_path):
    found = processes.compared(processes.recipes(tmp_path, steps=50)[name], tmp_path / "runs", name)
    assert found["steps"] == 50
    assert max(found["greatest_difference_of_losses"].values()) < 1e-5
    assert max(found["greatest_difference_of_held_out_losses"].values()) < 1e-5
