"""A layer that only maps its heads, run by the stock class: the same outputs, for as long as it is that layer."""

import copy
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import toys
from crosshead.modeling import head_cache, mixed_attention
from folding import LINEAR, TOKENS, folded, holds, plainly, unfolded


def stands(model: Any) -> list[bool]:
    """For which layers a twin of the stock class would be run."""
    with torch.no_grad():
        return [layer.self_attn._whole.twin(layer.self_attn) is not None for layer in model.model.layers]


@pytest.mark.parametrize("backbone", toys.BACKBONES)
@pytest.mark.parametrize("on", (["value"], ["query", "key"], ["query", "key", "value"]))
def test_a_layer_that_only_maps_is_run_by_the_stock_class(
    backbone: str, on: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = toys.mixed_model(backbone, {"knocking": {"form": "linear", "on": on}}, "sdpa")
    model = model.eval() if backbone == "Qwen3Moe" else model.double().eval()
    padded = {"attention_mask": torch.tensor([[0] * 3 + [1] * 4, [1] * 7]), "do_sample": False, "max_new_tokens": 9}
    asked: list[int] = []
    monkeypatch.setattr(mixed_attention, "pass_cache", lambda *call: asked.append(1) or head_cache.pass_cache(*call))
    ours = model.generate(TOKENS, return_dict_in_generate=True, output_logits=True, **padded)
    assert stands(model) == [True, True] and len(asked) == 2  # the first call of each layer, which folds it
    with plainly():
        plain = model.generate(TOKENS, return_dict_in_generate=True, output_logits=True, **padded)
    assert torch.equal(ours.sequences, plain.sequences) and len(asked) == 2 + 2 * 9
    torch.testing.assert_close(ours.logits, plain.logits)


def _replaced(attention: Any) -> None:
    attention.mixers["knocking"] = copy.deepcopy(attention.mixers["knocking"])


def _map_replaced(attention: Any) -> None:
    attention.mixers["knocking"].value = copy.deepcopy(attention.mixers["knocking"].value)


def _scaled(attention: Any) -> None:
    attention.scaling *= 2


def _watched(attention: Any) -> None:
    attention.mixers["knocking"].value.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("change", (_replaced, _map_replaced, _scaled, _watched))
def test_a_twin_ends_with_what_it_was_made_of(change: Callable[[Any], None]) -> None:
    model = toys.mixed_model("Llama", LINEAR, "sdpa").double().eval()
    folded(model)
    change(model.model.layers[0].self_attn)
    assert stands(model) == [False, True]
    torch.testing.assert_close(folded(model), unfolded(model), rtol=1e-9, atol=1e-9)


def test_no_twin_where_more_is_to_do() -> None:
    for more in ({"talking": {}}, {"explicit": {"key_heads": 1, "value_heads": 1}}):
        model = toys.mixed_model("Llama", LINEAR | more, "sdpa").eval()
        folded(model)
        assert all(holds(model)) and not any(stands(model))
    model = toys.mixed_model("Llama", LINEAR, "sdpa").double().eval()
    folded(model)
    model.set_attn_implementation("eager")  # the library's is not precise in float64
    torch.testing.assert_close(folded(model), unfolded(model), rtol=1e-12, atol=1e-12)


def _replica(attention: Any, factor: float) -> Any:
    """As `torch.nn.parallel.replicate` makes it: parts of its own, whose weights are plain attributes."""
    replica = attention._replicate_for_data_parallel()
    replica._modules = {name: copy.deepcopy(part) for name, part in attention.named_children()}
    for part in replica.modules():
        for name, weight in part._parameters.items():
            vars(part)[name] = None if weight is None else factor * weight.detach()
        part._parameters = {}
    return replica


def test_replicas_of_a_layer_are_not_each_others_twins() -> None:
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
    assert stands(model) == [True, True]
