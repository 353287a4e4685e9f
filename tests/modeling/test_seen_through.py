"""`torch.func` and tracers get what plain operations give, whatever quick way there is beside them."""

from typing import Any

import pytest
import torch
from torch.func import functional_call, grad, vmap

import toys
from folding import LINEAR, TOKENS, folded, holds, unfolded
from tiers import grid

CASES = toys.CASES | {"linear": LINEAR}


@pytest.mark.parametrize(("case", "backend"), grid(CASES, ("eager", "sdpa"), strength=1))
def test_transformed_gradients(case: str, backend: str) -> None:
    model = toys.mixed_model("Llama", CASES[case], backend).double()
    some = {name: weight.detach() for name, weight in model.named_parameters() if "mlp" in name}

    def loss(weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        return functional_call(model, weights, (ids,), {"labels": ids, "use_cache": False}).loss

    expected = []
    for ids in TOKENS:
        model.zero_grad()
        model(ids[None], labels=ids[None], use_cache=False).loss.backward()
        expected.append({name: model.get_parameter(name).grad.clone() for name in some})
    torch.testing.assert_close(grad(loss)(some, TOKENS[:1]), expected[0])
    of_each: Any = vmap(lambda ids: grad(loss)(some, ids[None]))(TOKENS)
    torch.testing.assert_close(of_each, {name: torch.stack([each[name] for each in expected]) for name in some})


class _Logits(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, use_cache=False).logits


def test_a_trace_holds_no_product() -> None:
    model = toys.mixed_model("Llama", LINEAR, "sdpa").double().eval()
    folded(model)
    assert all(holds(model))
    with torch.no_grad():
        trace = torch.jit.trace(_Logits(model), TOKENS, check_trace=False)
        model.model.layers[0].self_attn.v_proj.weight.mul_(2)
        torch.testing.assert_close(trace(TOKENS), unfolded(model))


def test_hooks_on_all_modules_see_all() -> None:
    model, seen = toys.mixed_model("Llama", LINEAR, "sdpa").eval(), []
    folded(model)
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        folded(model)
    finally:
        hook.remove()
    parts = [module for layer in model.model.layers for module in layer.modules() if not module._modules]
    assert {id(module) for module in seen}.issuperset(map(id, parts))


def test_nothing_fake_is_kept() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = toys.mixed_model("Llama", LINEAR, "sdpa").eval()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        model(inputs_embeds=mode.from_tensor(torch.randn(2, 7, 24)))
    torch.testing.assert_close(folded(model), unfolded(model))
