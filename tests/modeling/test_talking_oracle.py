"""Blockwise Talking-Heads attention: layers compared with the oracle, whole models compared with eager attention."""

import math
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from crosshead.modeling.mechanisms import talking_blocks
from oracle_layers import OPTION_CASES, Layer, assert_layer_agrees
from tiers import first, grid
from toys import BACKBONES, CASES, mixed_model, tokens

TALKING = {name: mixers for name, mixers in (CASES | OPTION_CASES).items() if "talking" in mixers}
for_every_case = pytest.mark.parametrize("case", TALKING)
for_first_case = pytest.mark.parametrize("case", first(TALKING))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(talking_blocks, "TALKING_CPU_BLOCKS", (2**23, 1, 1, 3))


@pytest.mark.parametrize(("case", "backbone"), grid(TALKING, BACKBONES, strength=1))
def test_layer_follows_the_oracle(case: str, backbone: str) -> None:
    assert_layer_agrees(Layer(backbone, TALKING[case], backend="sdpa"))


@pytest.mark.parametrize(("case", "heads"), grid(TALKING, ((4, 4), (4, 1), (6, 2), (1, 1)), strength=1))
def test_layer_with_other_head_counts_follows_the_oracle(case: str, heads: tuple[int, int]) -> None:
    if heads[0] == 1 and case != "talking":
        pytest.skip("the other cases count on more heads")
    assert_layer_agrees(
        Layer("Llama", TALKING[case], backend="sdpa", num_attention_heads=heads[0], num_key_value_heads=heads[1])
        if "explicit" not in TALKING[case]
        else Layer("Llama", TALKING[case], backend="sdpa")
    )


@for_every_case
def test_layer_with_cache_follows_the_oracle(case: str) -> None:
    layer, cache = Layer("Qwen3", TALKING[case], backend="sdpa"), DynamicCache()
    parts = ((0, 4), (4, 6), (6, 7))
    assert_layer_agrees(layer, lambda: torch.cat([layer.ours(cache, *part) for part in parts], dim=1))


def eager_and_blockwise_model(case: str, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Any, Any]:
    """Return a toy model with eager attention, and the same model with blockwise attention ("sdpa")."""
    eager, blocks = (mixed_model("Qwen3", TALKING[case], backend=backend, **changes) for backend in ("eager", "sdpa"))
    return eager.to(dtype), blocks.to(dtype)


@for_first_case
@torch.no_grad()
def test_blockwise_model_equals_eager_for_every_mask(case: str) -> None:
    """Covers no padding, left and right padding, packed documents and sliding windows."""
    ids, left = tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    left[1, :5] = 0
    packed = torch.tensor([[*range(5), *range(7)]] * 2)
    window: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    for changes, arguments in (
        ({}, {}),
        ({}, {"attention_mask": left}),
        ({}, {"attention_mask": left.flip(1)}),
        ({}, {"position_ids": packed, "use_cache": False}),
        (window, {}),
        (window, {"attention_mask": left}),
    ):
        eager, blocks = (model(ids, **arguments).logits for model in eager_and_blockwise_model(case, **changes))
        real = arguments.get("attention_mask", torch.ones_like(ids)).bool()
        assert blocks.isfinite().all()
        assert (eager - blocks)[real].abs().max() < 1e-4, (changes, arguments)


@for_first_case
@pytest.mark.parametrize("cache", ("dynamic", "static"))
def test_blockwise_generation_equals_eager(case: str, cache: str) -> None:
    mask = torch.tensor([[1] * 9, [0] * 3 + [1] * 6])
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
    if cache == "static":
        options["disable_compile"] = True
    eager, blocks = (
        model.generate(tokens(), attention_mask=mask, **options) for model in eager_and_blockwise_model(case)
    )
    assert torch.equal(eager, blocks)


# Without `mixture`, since rounding changes its routes.
@pytest.mark.parametrize("case", first(case for case in TALKING if "mixture" not in case))
def test_blockwise_gradients_equal_eager_in_every_training_mode(case: str) -> None:
    for dtype, autocast, checkpointing in (
        (torch.float32, False, True),
        (torch.float32, True, False),
        (torch.bfloat16, False, False),
    ):
        gradients = []
        for model in eager_and_blockwise_model(case, dtype):
            model.train()
            if checkpointing:
                model.gradient_checkpointing_enable()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(tokens(), labels=tokens(), use_cache=False).loss
            loss.backward()
            gradients.append({name: x.grad for name, x in model.named_parameters()} | {"loss": loss.detach()})
        exact = dtype == torch.float32 and not autocast
        for name, expected in gradients[0].items():
            error = (gradients[1][name] - expected).norm() / (expected.norm() + 1e-3)
            assert gradients[1][name].dtype == expected.dtype
            assert error < (1e-4 if exact else 0.25), (name, dtype, autocast)


def test_boolean_and_additive_4d_masks_give_the_same_logits() -> None:
    ids = tokens(2, 9)
    allowed = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    allowed[0, :, 4:, 2] = False
    additive = torch.zeros(allowed.shape).masked_fill(~allowed, -math.inf)
    eager, blocks = eager_and_blockwise_model("talking")
    with torch.no_grad():
        expected = eager(ids, attention_mask=additive).logits
        for mask in (allowed, additive):
            assert (blocks(ids, attention_mask=mask).logits - expected).abs().max() < 1e-4
