"""Sparse `mixture` attention: computing only the routed queries gives the same outputs and gradients as all."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from crosshead.modeling.kernels import cpu_mixture
from crosshead.modeling.mechanisms.mixture import RouterMap
from oracle_layers import assert_sdpa_agrees
from routed_cases import (
    INPUTS,
    MIXTURES,
    SKIPPING,
    WINDOW,
    logits_and_gradients,
    logits_in_parts,
)
from tiers import grid
from toys import mixed_model, tokens


@pytest.fixture
def sparse_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Enable the sparse path for short sequences; yields the number of queries of each of its calls."""
    query_counts: list[int] = []
    skip = cpu_mixture.routed_heads

    def noted(query: torch.Tensor, *rest: Any) -> torch.Tensor:
        query_counts.append(query.shape[2])
        return skip(query, *rest)

    monkeypatch.setattr(cpu_mixture, "routed_heads", noted)
    monkeypatch.setattr(cpu_mixture, "MIN_QUERIES", 2)
    monkeypatch.setattr(cpu_mixture, "MAX_FRACTION", 1.0)
    monkeypatch.setattr(cpu_mixture, "BLOCK_ROWS", 3)
    yield query_counts


@pytest.mark.parametrize(
    ("case", "heads", "padding"), grid(MIXTURES, ((4, 2), (4, 1), (4, 4)), ((0, 0), (0, 2), None), strength=1)
)
def test_layer_follows_the_oracle(
    case: str, heads: tuple[int, int], padding: tuple[int, int] | None, sparse_calls: list[int]
) -> None:
    """Compares with the oracle, with a mask and without."""
    if "version 2" in case and heads[1] == 4:
        pytest.skip("two query heads read each key/value head")
    if "differential" in case and "version 2" not in case and heads[1] == 1:
        pytest.skip("differential pairs key/value heads")
    assert_sdpa_agrees(MIXTURES[case], heads, padding)
    assert sparse_calls == ([] if "differential" in case else [7])


@pytest.mark.parametrize(("kind", "changes"), grid(INPUTS, ({}, WINDOW), strength=1))
def test_sparse_model_equals_dense_path(
    kind: str, changes: dict[str, Any], sparse_calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares a whole model with transformers' masks on the sparse and on the dense path."""
    model = mixed_model("Qwen3", SKIPPING, "sdpa", **changes).double()
    sparse = logits_and_gradients(model, kind)
    assert sparse_calls == [12, 12]
    monkeypatch.setattr(cpu_mixture, "MAX_FRACTION", 0.0)
    for ours, dense in zip(sparse, logits_and_gradients(model, kind), strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-6, atol=1e-8)  # norms and positions run in float32
    assert sparse_calls == [12, 12]


@pytest.mark.parametrize(("head", "kind"), grid(range(3), INPUTS, strength=1))
def test_sparse_equals_dense_when_router_selects_one_head(
    head: int, kind: str, sparse_calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other routed heads get no tokens. Compares outputs and all gradients."""

    scores = RouterMap.forward

    def rigged(router: RouterMap, hidden_states: torch.Tensor) -> torch.Tensor:
        probabilities = scores(router, hidden_states)
        if probabilities.shape[-1] == 3:
            probabilities = (probabilities.log() + 30 * nn.functional.one_hot(torch.tensor(head), 3)).softmax(-1)
        return probabilities

    monkeypatch.setattr(RouterMap, "forward", rigged)
    model = mixed_model("Llama", SKIPPING, "sdpa").double()
    gates = []
    for layer in model.model.layers:
        layer.self_attn.mixers["mixture"].register_forward_hook(lambda _, __, output: gates.append(output[0]))
    sparse = logits_and_gradients(model, kind)
    assert sparse_calls == [12, 12]
    assert all((gate[..., 1:] != 0).sum((0, 1)).tolist() == [24 * (i == head) for i in range(3)] for gate in gates)
    monkeypatch.setattr(cpu_mixture, "MAX_FRACTION", 0.0)
    for ours, dense in zip(sparse, logits_and_gradients(model, kind), strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-6, atol=1e-8)
    assert sparse_calls == [12, 12]


def test_chunked_prefill_gives_the_same_logits(sparse_calls: list[int]) -> None:
    model, ids = mixed_model("Llama", SKIPPING, "sdpa"), tokens(2, 12)
    logits = logits_in_parts(model, ids, (5, 6, 1))
    torch.testing.assert_close(logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    assert sparse_calls == [5, 5, 6, 6, 12, 12]


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_long_prompt_uses_sparse_path_in_float32_only(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the shipped thresholds."""
    model = mixed_model("Llama", SKIPPING, "sdpa", max_position_embeddings=4096).to(dtype)
    ids = tokens(1, 2100)
    with torch.no_grad():
        sparse = model(ids).logits
        monkeypatch.setattr(cpu_mixture, "MAX_FRACTION", 0.0)
        expected = model(ids).logits
    assert torch.equal(sparse, expected) == (dtype == torch.bfloat16)
    torch.testing.assert_close(sparse, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.usefixtures("sparse_calls")
def test_compiled_step_is_one_graph_without_sparse_path(sparse_calls: list[int]) -> None:
    model = mixed_model("Llama", SKIPPING, "sdpa").train()
    ids = tokens()
    torch.compile(model, fullgraph=True, backend="aot_eager")(ids, labels=ids, use_cache=False).loss.backward()
    assert not sparse_calls
    torch.compiler.reset()
