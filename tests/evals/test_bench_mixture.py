"""What `mixture` is timed against computes the same, and two callables are timed in turn."""

from dataclasses import replace

import pytest
import torch

from crosshead.evals import bench_mixture
from crosshead.evals.bench_mixture import CASES, HEADS, MAKERS, Case
from crosshead.evals.bench_pairs import compare, figures
from crosshead.modeling import routed_attention


def test_who_goes_first_alternates() -> None:
    ran: list[str] = []
    found = compare(lambda: ran.append("ours"), lambda: ran.append("rival"), 3)
    assert ran[4:] == ["rival", "ours", "ours", "rival", "rival", "ours"]  # behind the two warm-ups of each
    assert len(found["ours"]) == len(found["rival"]) == len(found["ratios"]) == 3


def test_a_ratio_is_of_neighbours() -> None:
    found = figures([1.0, 4.0, 9.0], [2.0, 2.0, 2.0])
    assert found["ratios"] == [0.5, 2.0, 4.5]
    assert (found["median_ratio"], found["least_ratio"], found["greatest_ratio"]) == (2.0, 0.5, 4.5)
    assert (found["median_ours"], found["median_rival"]) == (4.0, 2.0)


def test_cases_have_names_and_makers() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.what for case in CASES} == set(MAKERS)


def test_attention_sides_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    case, routes = Case("forward", 40, 8, 4), []
    made = bench_mixture._routes
    monkeypatch.setattr(bench_mixture, "_routes", lambda case: routes.append(made(case)) or routes[0])
    ours, dense = case.pair()
    found, expected = ours(), dense()
    assert routes[0].sum(-1).eq(8).all() and routes[0][..., :4].all()
    assert isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor)
    torch.testing.assert_close(found, expected.transpose(1, 2) * routes[0][..., None])
    for gradients in (side() for side in replace(case, what="forward and backward").pair()):
        assert [x.shape for x in gradients] == [(1, HEADS, 40, 64)] * 3  # type: ignore[attr-defined]


def test_model_sides_run(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    monkeypatch.setattr(bench_mixture, "SHAPE", bench_mixture.SHAPE | small)
    monkeypatch.setattr(routed_attention, "LEAST_QUERIES", 8)
    for side in Case("prefill", 12, 8, 4).pair():
        assert side().logits.shape == (1, 1, 1024)  # type: ignore[attr-defined]
