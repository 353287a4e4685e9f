"""Paired measurements: two sides run in turn, and each ratio compares the two readings of one round."""

import pytest

from crosshead.evals.bench import pairs as bench_pairs
from crosshead.evals.bench.pairs import figures, measure_alternating, seconds, timed


@pytest.fixture
def work(monkeypatch):
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


def test_who_goes_first_alternates(work):
    make, ran = work
    report = measure_alternating(timed(make("ours", 1.0)), timed(make("baseline", 4.0)), 3)
    assert ran[:4] == ["ours", "ours", "baseline", "baseline"]  # two warm-up runs per side
    assert ran[4:] == ["baseline", "ours", "ours", "baseline", "baseline", "ours"]
    assert (report["ours"], report["baseline"], report["ratios"]) == ([1.0] * 3, [4.0] * 3, [0.25] * 3)


def test_warm_ups_do_not_count(work):
    make, _ = work
    readings = (timed(make("ours", 9.0, 8.0, 3.0)), timed(make("baseline", 7.0, 6.0, 2.0)))
    assert measure_alternating(*readings, 2)["median_ratio"] == 1.5


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
    report = figures([1.0, 4.0, 9.0, 8.0, 6.0], [2.0] * 5)
    assert report["ratios"] == [0.5, 2.0, 4.5, 4.0, 3.0]
    assert (report["median_ratio"], report["least_ratio"], report["greatest_ratio"]) == (3.0, 0.5, 4.5)
    assert report["quartile_ratios"] == [2.0, 4.0]
    assert (report["median_ours"], report["median_baseline"]) == (6.0, 2.0)


def test_one_round_has_no_spread():
    assert figures([1.0], [4.0])["quartile_ratios"] == [0.25, 0.25]


def test_every_round_is_told():
    done = []
    measure_alternating(lambda: 1.0, lambda: 2.0, 3, lambda: done.append(1))
    assert len(done) == 3
