import pytest
import torch

from crosshead.conversion.compress import aligned_maps as values_module
from crosshead.conversion.compress.aligned_frame import Errors, Frame
from crosshead.conversion.compress.aligned_maps import (
    aligned_keys,
    aligned_values,
    cheapest_groups,
    grouped_values,
    mixed_keys,
    one_fewer_values,
    pair_maps,
)
from tiers import grid

D = 6


def random_tensor(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_gram(*shape, seed=0, rank=None):
    root = random_tensor(*shape, rank or 2 * shape[-1], seed=seed)
    return root @ root.mT


def random_statistics(heads, parts=1, seed=0, bias=False):
    """Return random statistics: metric (heads, parts, D, D), gram (heads, parts, features, features), weights."""
    features = heads * D + bias
    metric = random_gram(heads, parts, D, seed=seed)
    return metric, random_gram(heads, parts, features, seed=seed + 1), torch.ones(heads, parts).double()


def expand_to_heads(gram, heads):
    return gram.expand(heads, 1, -1, -1)


@pytest.mark.parametrize(("heads", "components"), [(2, 1), (3, 1), (3, 2), (4, 1), (4, 3)])
def test_value_solvers_reach_optimal_low_rank_error(heads, components, monkeypatch):
    monkeypatch.setattr(values_module, "FLOOR", 0.0)
    gram = random_gram(heads * D, seed=2)
    make = one_fewer_values if components == heads - 1 > 1 else grouped_values
    frame = make(gram, heads, D, components)
    difference = frame.heads().flatten(0, 1) - torch.eye(heads * D).double()
    lost = float(torch.trace(difference @ gram @ difference.T))
    best = float(torch.linalg.eigvalsh(gram)[: (heads - components) * D].sum())
    assert lost == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize(("heads", "components"), [(2, 1), (3, 2)])
def test_aligned_values_are_near_optimal_under_metric(heads, components):
    metric, gram = random_gram(heads, 1, D, seed=3), random_gram(heads * D, seed=4)
    errors = Errors.of(metric, expand_to_heads(gram, heads), torch.ones(heads, 1).double())
    lost = float(errors.of_heads(aligned_values(errors, components).heads()))
    root = torch.linalg.cholesky(torch.block_diag(*errors.metric[:, 0]))
    best = float(torch.linalg.eigvalsh(root.T @ errors.gram[0, 0] @ root)[: (heads - components) * D].sum())
    assert best * (1 - 1e-9) <= lost < best * 1.02


@pytest.mark.parametrize(("heads", "components"), [(2, 1), (3, 1), (3, 2), (4, 3)])
def test_aligned_keys_are_near_optimal_for_complex_mixing(heads, components):
    """If the pairs of features that RoPE rotates are independent, the optimum is the sum of the pairs' optima."""
    pairs = [random_gram(2 * heads, seed=10 + p) for p in range(D // 2)]
    turn = pair_maps(torch.tensor([1j]).to(torch.complex128))
    gram = torch.zeros(heads * D, heads * D, dtype=torch.float64)
    best = 0.0
    for p, pair in enumerate(pairs):
        quarter = torch.block_diag(*[turn] * heads)
        pair = (pair + quarter @ pair @ quarter.T) / 2  # invariant under RoPE's rotations
        rows = [i * D + p + half * D // 2 for i in range(heads) for half in (0, 1)]
        gram[torch.tensor(rows)[:, None], torch.tensor(rows)] = pair
        best += float(torch.linalg.eigvalsh(pair)[: 2 * (heads - components)].sum())
    errors = Errors(torch.eye(D).double().expand(heads, 1, -1, -1), expand_to_heads(gram, heads))
    lost = float(errors.of_heads(aligned_keys(errors, components).heads()))
    assert best * (1 - 1e-6) <= lost < best * 1.02


@pytest.mark.parametrize(
    ("solve", "components", "bias"),
    grid([aligned_keys, aligned_values, mixed_keys], [1, 2, 3], [False, True], strength=1),
)
def test_maps_are_well_conditioned_and_errors_fall_with_components(solve, components, bias):
    errors = Errors.of(*random_statistics(4, parts=2, bias=bias))
    frame = solve(errors, components)
    whole = float(errors.of_heads(torch.zeros_like(frame.heads())))
    assert frame.components.shape == (components, D, 4 * D + bias)
    assert 0 < float(errors.of_heads(frame.heads())) < whole
    assert float(errors.of_rounding(frame)) < 1e-2 * whole
    if components > 1:
        fewer = solve(errors, components - 1)
        assert float(errors.of_heads(frame.heads())) < float(errors.of_heads(fewer.heads()))


@pytest.mark.parametrize(("solve", "components"), grid([aligned_keys, aligned_values], [1, 2], strength=1))
def test_solution_is_invariant_to_head_basis(solve, components):
    """The solution does not depend on the basis of each head: invertible maps change only the coordinates."""
    metric, gram, weight = random_statistics(3, parts=2 if solve is aligned_keys else 1)
    maps = torch.linalg.qr(random_tensor(3, D, D, seed=8)).Q * torch.linspace(0.5, 2, D)
    if solve is aligned_keys:
        maps = pair_maps(torch.view_as_complex(random_tensor(3, D // 2, 2, seed=9)))
    inverse, whole = torch.linalg.inv(maps).unsqueeze(1), torch.block_diag(*maps)
    plain = Errors.of(metric, gram, weight)
    moved = Errors.of(inverse.mT @ metric @ inverse, whole @ gram @ whole.T, weight)
    heads = solve(plain, components).heads()
    back = inverse.squeeze(1) @ solve(moved, components).heads() @ whole
    assert float(plain.of_heads(back)) == pytest.approx(float(plain.of_heads(heads)), rel=2e-2)


@pytest.mark.parametrize(("solve", "components"), grid([aligned_keys, aligned_values, mixed_keys], [1, 2], strength=1))
def test_degenerate_statistics_give_finite_frames(solve, components):
    one = torch.ones(3, 1).double()
    poor = [
        (torch.zeros(3, 1, D, D), torch.zeros(3, 1, 3 * D, 3 * D), 0 * one),
        (random_gram(3, 1, D), random_gram(3 * D, rank=1).expand(3, 1, -1, -1), one),
        (random_gram(3, 1, D, rank=1), random_gram(3 * D, rank=2).expand(3, 1, -1, -1), one),
        (1e12 * random_gram(3, 1, D), 1e12 * random_gram(3 * D).expand(3, 1, -1, -1), 1e12 * one),
    ]
    for metric, gram, weight in poor:
        frame = solve(Errors.of(metric, gram, weight), components)
        for tensor in (frame.components, frame.scalars, frame.maps):
            assert torch.isfinite(tensor).all()
            assert float(tensor.abs().max()) < 1e9


def test_normalised_maps_give_same_heads():
    frame = Frame(random_tensor(2, D, 3 * D), random_tensor(3, 2, seed=1), 20 * random_tensor(3, D, D, seed=2))
    even = frame.with_normalised_maps()
    assert torch.allclose(even.heads(), frame.heads(), rtol=1e-9)
    assert torch.allclose((even.maps.mT @ even.maps).mean(0), torch.eye(D).double(), atol=1e-9)


@pytest.mark.parametrize("solve", [aligned_keys, aligned_values])
def test_fitted_maps_are_orthogonal_on_average(solve):
    """Maps are orthogonal on average, so that weights keep their sizes whatever the coordinates of the fit."""
    metric, gram, weight = random_statistics(3)
    maps = solve(Errors.of(100 * metric, gram / 100, weight), 2).maps
    assert torch.allclose((maps.mT @ maps).mean(0), torch.eye(D).double(), atol=1e-9)
    turn = pair_maps(torch.full((D // 2,), 1j).to(torch.complex128))
    assert solve is aligned_values or torch.allclose(maps @ turn, turn @ maps)  # keys still commute with RoPE


def test_cheapest_groups_minimise_cost():
    kinds = (0, 1, 0, 1, 1)
    assert cheapest_groups(5, 2, lambda group: len({kinds[head] for head in group}) - 1.0) == [(0, 2), (1, 3, 4)]
    assert cheapest_groups(3, 3, lambda group: 0.0) == [(0,), (1,), (2,)]
