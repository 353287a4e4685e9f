"""Paired measurements: two sides run in turn, and each ratio compares the two readings of one round."""

import pytest

from crosshead.evals.bench import pairs as bench_pairs
from crosshead.evals.bench.pairs import figures, measure_alternating, seconds, timed


@pytest.fixture
def timed_runs(monkeypatch):
    """A factory of runs that take the given seconds on a fake clock, and the list of runs so far."""
    now, ran = [0.0], []
    monkeypatch.setattr(bench_pairs.time, "perf_counter", lambda: now[0])

    def make(name, *durations):
        left = list(durations)

        def run():
            ran.append(name)
            now[0] += left.pop(0) if len(left) > 1 else left[0]

        return run

    return make, ran


def test_sides_alternate_in_running_first(timed_runs):
    make, ran = timed_runs
    report = measure_alternating(timed(make("ours", 1.0)), timed(make("baseline", 4.0)), 3)
    assert ran[:4] == ["ours", "ours", "baseline", "baseline"]  # two warm-up runs per side
    assert ran[4:] == ["baseline", "ours", "ours", "baseline", "baseline", "ours"]
    assert (report["ours"], report["baseline"], report["ratios"]) == ([1.0] * 3, [4.0] * 3, [0.25] * 3)


def test_warm_up_runs_are_not_measured(timed_runs):
    make, _ = timed_runs
    readings = (timed(make("ours", 9.0, 8.0, 3.0)), timed(make("baseline", 7.0, 6.0, 2.0)))
    assert measure_alternating(*readings, 2)["median_ratio"] == 1.5


def test_short_runs_are_repeated_to_reach_the_minimum_time(timed_runs):
    make, ran = timed_runs
    read = timed(make("short", 0.0625))
    del ran[:]
    assert read() == pytest.approx(0.0625)
    assert len(ran) == 4  # a fifth of a second, at least
    read = timed(make("long", 0.3))
    del ran[:]
    assert read() == pytest.approx(0.3) and len(ran) == 1


def test_seconds_is_the_mean_of_repeated_runs(timed_runs):
    make, _ = timed_runs
    assert seconds(make("run", 1.0, 2.0, 6.0), 3) == 3.0


def test_ratios_pair_readings_of_the_same_round():
    report = figures([1.0, 4.0, 9.0, 8.0, 6.0], [2.0] * 5)
    assert report["ratios"] == [0.5, 2.0, 4.5, 4.0, 3.0]
    assert (report["median_ratio"], report["least_ratio"], report["greatest_ratio"]) == (3.0, 0.5, 4.5)
    assert report["quartile_ratios"] == [2.0, 4.0]
    assert (report["median_ours"], report["median_baseline"]) == (6.0, 2.0)


def test_quartiles_of_one_round_are_equal():
    assert figures([1.0], [4.0])["quartile_ratios"] == [0.25, 0.25]


def test_progress_is_reported_for_every_round():
    done = []
    measure_alternating(lambda: 1.0, lambda: 2.0, 3, lambda: done.append(1))
    assert len(done) == 3
