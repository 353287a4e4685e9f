"""The experts' balance loss when a batch is accumulated over several calls."""

from typing import Any

import pytest
import torch

from tiers import grid
from toys import CASES, mixed_model, stock_model, tokens

WEIGHT = 8.0  # makes the balance loss as large as the cross-entropy, so that counting it per call is detected
IGNORED = -100


def batch() -> dict[str, torch.Tensor]:
    """Return four sequences, one of which has fewer labels than the others."""
    ids = tokens(4, 9)
    labels = ids.clone()
    labels[3, 4:] = IGNORED
    return {"input_ids": ids, "labels": labels}


def predicted_token_count(labels: torch.Tensor) -> int:
    """Return the number of predicted tokens."""
    return int(labels[:, 1:].ne(IGNORED).sum())


def losses(model: Any, count: int) -> list[tuple[float, float, float]]:
    """Split the batch into `count` calls; return the loss, the experts' balance loss and the token share of each."""
    items = torch.tensor(predicted_token_count(batch()["labels"]))
    pieces = {name: values.chunk(count) for name, values in batch().items()}
    results = []
    for index in range(count):
        part = {name: values[index] for name, values in pieces.items()}
        output = model(**part, num_items_in_batch=items, use_cache=False)
        results.append(
            (output.loss.item(), output.aux_loss.item(), predicted_token_count(part["labels"]) / items.item())
        )
    return results


@pytest.mark.parametrize(("case", "count"), grid(["knocking", "mixture"], [1, 2, 4], strength=1))
@torch.no_grad()
def test_aux_loss_of_each_call_is_weighted_by_token_share(case: str, count: int) -> None:
    model, without = (
        mixed_model("Qwen3Moe", CASES[case], output_router_logits=True, router_aux_loss_coef=weight)
        for weight in (WEIGHT, 0.0)
    )
    for (loss, aux, share), (plain, *_) in zip(losses(model, count), losses(without, count), strict=True):
        assert loss == pytest.approx(plain + WEIGHT * share * aux, rel=1e-5)
    assert sum(share for _, _, share in losses(model, count)) == pytest.approx(1.0)


@torch.no_grad()
def test_aux_loss_of_single_call_counts_in_full() -> None:
    model, without = (
        mixed_model("Qwen3Moe", {}, output_router_logits=True, router_aux_loss_coef=weight) for weight in (WEIGHT, 0.0)
    )
    stock = stock_model("Qwen3Moe", output_router_logits=True, router_aux_loss_coef=WEIGHT)
    stock.load_state_dict(model.state_dict())
    output, expected = model(**batch()), stock(**batch())
    torch.testing.assert_close(output.aux_loss, expected.aux_loss)
    torch.testing.assert_close(output.loss, expected.loss)
    assert output.loss.item() == pytest.approx((without(**batch()).loss + WEIGHT * output.aux_loss).item(), rel=1e-5)


@pytest.mark.parametrize("window", ({}, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}))
@torch.no_grad()
def test_static_cache_generation_with_router_logits_equals_dynamic(window: dict[str, Any]) -> None:
    model = mixed_model("Qwen3Moe", CASES["mixture"], output_router_logits=True, **window)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
    padding = torch.tensor([[0] * 3 + [1] * 6, [1] * 9])
    generated = [
        model.generate(tokens(), attention_mask=padding, cache_implementation=cache, **options)
        for cache in ("static", "dynamic")
    ]
    assert torch.equal(*generated)


@torch.no_grad()
def test_aux_loss_with_4d_mask_counts_all_tokens() -> None:
    model = mixed_model("Qwen3Moe", CASES["mixture"], output_router_logits=True)
    mask = torch.ones(9, 9).tril().log().clamp_min(-1e30).expand(2, 1, 9, 9)
    assert model(tokens(), attention_mask=mask).aux_loss == pytest.approx(model(tokens()).aux_loss)
