"""A SteppedRun makes one step of a run for each call of `step`."""

import pytest

from crosshead.recipes.bench_train import SteppedRun


def counting_run(made, steps=3):
    def run(rest):
        try:
            for step in range(steps):
                made.append(step)
                rest()
            made.append("end")
        finally:
            made.append("left")

    return run


def test_each_call_of_step_makes_exactly_one_step():
    one, other = [], []
    with SteppedRun(counting_run(one)) as first, SteppedRun(counting_run(other)) as second:
        assert one == other == []
        first.step()
        assert (one, other) == ([0], [])
        second.step()
        first.step()
        assert (one, other) == ([0, 1], [0])
    assert (one, other) == ([0, 1, "left"], [0, "left"])


def test_run_without_step_calls_never_starts():
    made = []
    with SteppedRun(counting_run(made)):
        pass
    assert made == []


def test_step_after_end_of_run_raises():
    made = []
    with SteppedRun(counting_run(made, steps=1)) as run:
        run.step()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="step"):
                run.step()
    assert made == [0, "end", "left"]


def test_error_in_run_is_raised_by_step():
    def run(rest):
        rest()
        raise MemoryError("of the second step")

    with SteppedRun(run) as fails:
        fails.step()
        for _ in range(2):
            with pytest.raises(MemoryError, match="second step"):
                fails.step()


def test_keyboard_interrupt_ends_the_run():
    made = []
    with pytest.raises(KeyboardInterrupt), SteppedRun(counting_run(made)) as run:
        run.step()
        raise KeyboardInterrupt
    assert made == [0, "left"]
