"""Where numbers lie in a plot, and what its axes say."""

import pytest

from crosshead.evals.probe.plot import LEFT, TOP, Field, round_numbers, short


@pytest.mark.parametrize(
    ("first", "last", "ticks"),
    [
        (0, 29, [0, 10, 20]),
        (0, 3, [0, 1, 2, 3]),
        (-0.2, 3.13, [0, 1, 2, 3]),
        (2.51, 2.58, [2.52, 2.54, 2.56, 2.58]),
        (4, 4, [4]),
        (0.0012, 0.0061, [0.002, 0.003, 0.004, 0.005, 0.006]),
        (0, 1000, [0, 200, 400, 600, 800, 1000]),
    ],
)
def test_ticks_are_round_numbers(first, last, ticks):
    assert round_numbers(first, last) == pytest.approx(ticks)


def test_places():
    plain, logarithmic = Field([0, 10], [1, 2]), Field([1, 100], [1, 2], logarithmic=True)
    assert (plain.x(0), plain.x(5)) == (LEFT, LEFT + plain.width / 2)
    assert logarithmic.x(10) == LEFT + logarithmic.width / 2
    assert plain.y(1.5) == pytest.approx(TOP + plain.height / 2)
    assert TOP < plain.y(2) < plain.y(1) < TOP + plain.height


def test_short_numbers():
    assert [short(number) for number in (0.02, 3, 1234, 2.5e9)] == ["0.02", "3", "1.23k", "2.5B"]
