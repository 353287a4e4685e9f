"""A SteppedRun makes one step of a run for each call of `step`."""

import pytest

from crosshead.recipes.bench_train import SteppedRun


def counting(made, steps=3):
    def run(rest):
        try:
            for step in range(steps):
                made.append(step)
                rest()
            made.append("end")
        finally:
            made.append("left")

    return run


def test_a_step_is_made_when_it_is_asked_for_and_only_then():
    one, other = [], []
    with SteppedRun(counting(one)) as first, SteppedRun(counting(other)) as second:
        assert one == other == []
        first.step()
        assert (one, other) == ([0], [])
        second.step()
        first.step()
        assert (one, other) == ([0, 1], [0])
    assert (one, other) == ([0, 1, "left"], [0, "left"])


def test_a_run_nobody_asks_never_begins():
    made = []
    with SteppedRun(counting(made)):
        pass
    assert made == []


def test_more_steps_than_there_are():
    made = []
    with SteppedRun(counting(made, steps=1)) as run:
        run.step()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="step"):
                run.step()
    assert made == [0, "end", "left"]


def test_a_failure_reaches_whoever_asks_for_the_step():
    def run(rest):
        rest()
        raise MemoryError("of the second step")

    with SteppedRun(run) as fails:
        fails.step()
        for _ in range(2):
            with pytest.raises(MemoryError, match="second step"):
                fails.step()


def test_ctrl_c_ends_the_run_behind_its_step():
    made = []
    with pytest.raises(KeyboardInterrupt), SteppedRun(counting(made)) as run:
        run.step()
        raise KeyboardInterrupt
    assert made == [0, "left"]
