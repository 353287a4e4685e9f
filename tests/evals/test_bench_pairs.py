"""Two things are measured in turn, and a ratio is that of neighbours."""

import pytest

from crosshead.evals.bench import pairs as bench_pairs
from crosshead.evals.bench.pairs import figures, in_turn, seconds, timed


@pytest.fixture
def work(monkeypatch):
    """Makes runs that take so many seconds by a clock of our own; what ran is written down."""
    now, ran = [0.0], []
    monkeypatch.setattr(bench_pairs.time, "perf_counter", lambda: now[0])

    def make(name, *durations):
        left = list(durations)

        def run():
            ran.append(name)
            now[0] += left.pop(0) if len(left) > 1 else left[0]

        return run

    return make, ran


def test_who_goes_first_alternates(work):
    make, ran = work
    found = in_turn(timed(make("ours", 1.0)), timed(make("baseline", 4.0)), 3)
    assert ran[:4] == ["ours", "ours", "baseline", "baseline"]  # so that both are warm
    assert ran[4:] == ["baseline", "ours", "ours", "baseline", "baseline", "ours"]
    assert (found["ours"], found["baseline"], found["ratios"]) == ([1.0] * 3, [4.0] * 3, [0.25] * 3)


def test_warm_ups_do_not_count(work):
    make, _ = work
    readings = (timed(make("ours", 9.0, 8.0, 3.0)), timed(make("baseline", 7.0, 6.0, 2.0)))
    assert in_turn(*readings, 2)["median_ratio"] == 1.5


def test_a_short_run_is_timed_several_times_at_once(work):
    make, ran = work
    read = timed(make("short", 0.0625))
    del ran[:]
    assert read() == pytest.approx(0.0625)
    assert len(ran) == 4  # a fifth of a second, at least
    read = timed(make("long", 0.3))
    del ran[:]
    assert read() == pytest.approx(0.3) and len(ran) == 1


def test_of_several_runs_the_mean_counts(work):
    make, _ = work
    assert seconds(make("run", 1.0, 2.0, 6.0), 3) == 3.0


def test_a_ratio_is_of_neighbours():
    found = figures([1.0, 4.0, 9.0, 8.0, 6.0], [2.0] * 5)
    assert found["ratios"] == [0.5, 2.0, 4.5, 4.0, 3.0]
    assert (found["median_ratio"], found["least_ratio"], found["greatest_ratio"]) == (3.0, 0.5, 4.5)
    assert found["quartile_ratios"] == [2.0, 4.0]
    assert (found["median_ours"], found["median_baseline"]) == (6.0, 2.0)


def test_one_round_has_no_spread():
    assert figures([1.0], [4.0])["quartile_ratios"] == [0.25, 0.25]


def test_every_round_is_told():
    done = []
    in_turn(lambda: 1.0, lambda: 2.0, 3, lambda: done.append(1))
    assert len(done) == 3
