"""`torch.func` transforms models: per-sample gradients equal those of single calls."""

from typing import Any

import pytest
import torch
from torch.func import functional_call, grad, vmap

import toys
from tiers import grid

CASES = toys.CASES | {"linear": {"knocking": {"form": "linear"}}}
TOKENS = toys.tokens()


@pytest.mark.parametrize(("case", "backend"), grid(CASES, ("eager", "sdpa"), strength=1))
def test_torch_func_gradients_equal_autograd(case: str, backend: str) -> None:
    model = toys.mixed_model("Llama", CASES[case], backend).double()
    params = {name: weight.detach() for name, weight in model.named_parameters()}
    assert any(".mixers." in name for name in params)

    def loss(weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        return functional_call(model, weights, (ids,), {"labels": ids, "use_cache": False}).loss

    expected = []
    for ids in TOKENS:
        model.zero_grad()
        model(ids[None], labels=ids[None], use_cache=False).loss.backward()
        expected.append({name: model.get_parameter(name).grad.clone() for name in params})
    torch.testing.assert_close(grad(loss)(params, TOKENS[:1]), expected[0])
    per_sample: Any = vmap(lambda ids: grad(loss)(params, ids[None]))(TOKENS)
    torch.testing.assert_close(per_sample, {name: torch.stack([grads[name] for grads in expected]) for name in params})
