"""What was folded is let go in time: where weights change, adapters come and go, and several evaluate one model."""

import copy
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import toys
from folding import LINEAR, TOKENS, folded, holds, plainly, unfolded


def _in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.mixers["knocking"].value.weight.mul_(1.5)


def _by_step(model: Any) -> None:
    model(TOKENS, labels=TOKENS).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def _by_a_fused_step(model: Any) -> None:
    """Which no version tells of; and then no gradient either."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    model(TOKENS, labels=TOKENS).loss.backward()
    folded(model)
    optimiser.step()
    optimiser.zero_grad()


def _by_a_step_behind_a_call(model: Any) -> None:
    """The same, folded before there are gradients."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    loss = model(TOKENS, labels=TOKENS).loss
    folded(model)
    loss.backward()
    optimiser.step()
    optimiser.zero_grad()


def _by_an_adapter(model: Any) -> None:
    """Merged before it has ever run, through `.data`."""
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(3)
    peft.get_peft_model(model, settings).merge_and_unload()


def _by_state(model: Any) -> None:
    model.load_state_dict({name: tensor + 0.1 for name, tensor in model.state_dict().items()})


def _by_data(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.data * 1.1


def _by_data_in_training(model: Any) -> None:
    model.train()
    model.model.layers[0].self_attn.v_proj.weight.data.mul_(2)
    model.eval()


@pytest.mark.parametrize("backend", ("eager", "sdpa"))
@pytest.mark.parametrize(
    "change",
    (
        _in_place,
        _by_step,
        _by_a_fused_step,
        _by_a_step_behind_a_call,
        _by_an_adapter,
        _by_state,
        _by_data,
        _by_data_in_training,
    ),
)
def test_follows_the_weights(change: Callable[[Any], None], backend: str) -> None:
    model = toys.mixed_model("Llama", LINEAR, backend).double().eval()
    before = folded(model)
    change(model)
    after = folded(model)
    assert not torch.allclose(after, before)
    torch.testing.assert_close(after, unfolded(model), rtol=1e-9, atol=1e-9)


def test_lets_go() -> None:
    model = toys.mixed_model("Llama", LINEAR, "sdpa").eval()
    for let_go in (model.train, model.double, lambda: model.to("meta")):
        model.eval()
        folded(model)
        assert all(holds(model))
        let_go()
        assert not any(holds(model))


def test_an_adapter_that_is_switched() -> None:
    """Mechanisms that are trained whole beside it have a copy for each adapter."""
    peft = pytest.importorskip("peft")
    model = toys.mixed_model("Llama", LINEAR, "sdpa").double()
    settings = peft.LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=["knocking"])
    adapted = peft.get_peft_model(model, settings)
    adapted.add_adapter("other", settings)
    with torch.no_grad():
        for index, (name, weight) in enumerate(adapted.named_parameters()):
            if "modules_to_save" in name:
                weight.add_(torch.randn_like(weight) / (2 + index % 3))
    adapted.eval()
    seen = []
    for name in ("default", "other", "default"):
        adapted.set_adapter(name)
        seen.append(folded(model))
        torch.testing.assert_close(seen[-1], unfolded(model), rtol=1e-9, atol=1e-9)
        with adapted.disable_adapter():
            seen.append(folded(model))
            torch.testing.assert_close(seen[-1], unfolded(model), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(seen[0], seen[1]) and not torch.allclose(seen[0], seen[2])


def test_weights_that_come_and_go_are_left_alone() -> None:
    model = toys.mixed_model("Llama", LINEAR, "sdpa").eval()
    attention = model.model.layers[0].self_attn
    found = []
    for _ in range(4):
        attention.q_proj._parameters["weight"] = nn.Parameter(attention.q_proj.weight.detach().clone())
        folded(model)
        found.append(holds(model)[0])
    assert found == [["query", "key", "value"]] * 2 + [["key", "value"]] * 2
    model.eval()
    folded(model)
    assert holds(model)[0] == ["query", "key", "value"]


def _replica(attention: Any, factor: float) -> Any:
    """As `torch.nn.parallel.replicate` makes it: parts of its own, whose weights are plain attributes."""
    replica = attention._replicate_for_data_parallel()
    replica._modules = {name: copy.deepcopy(part) for name, part in attention.named_children()}
    for part in replica.modules():
        for name, weight in part._parameters.items():
            vars(part)[name] = None if weight is None else factor * weight.detach()
        part._parameters = {}
    return replica


def test_replicas_of_a_layer_fold_apart() -> None:
    model = toys.mixed_model("Llama", LINEAR, "sdpa").double().eval()
    folded(model)
    replicas = [_replica(model.model.layers[0].self_attn, factor) for factor in (1.0, 2.0)]
    call = torch.randn(1, 3, 24, dtype=torch.float64), (torch.ones(1, 3, 8), torch.zeros(1, 3, 8))
    with torch.no_grad():
        found = [replica(*call)[0] for replica in 2 * replicas]
        with plainly():
            expected = [replica(*call)[0] for replica in 2 * replicas]
    assert not torch.equal(*expected[:2])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_threads_evaluate_one_model() -> None:
    model = toys.mixed_model("Llama", LINEAR, "sdpa").double().eval()
    expected, interval = unfolded(model), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            for _ in range(30):
                model.eval()
                for found in threads.map(lambda _: folded(model), range(8)):
                    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    finally:
        sys.setswitchinterval(interval)
