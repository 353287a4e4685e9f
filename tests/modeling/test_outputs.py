"""Model outputs: the stock fields in the stock order, balance loss, router scores, and their use by the Trainer."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from transformers import LlamaConfig, Trainer, TrainingArguments

import crosshead
import oracle_routing
from case_grids import for_each_case_and_backbone
from tiers import grid
from toys import BACKBONES, CASES, mixed_model, stock_model, tokens


@for_each_case_and_backbone
@torch.no_grad()
def test_output_fields_and_tuples_have_stock_order(case: str, backbone: str) -> None:
    model, stock = mixed_model(backbone, CASES[case]), stock_model(backbone)
    extra = ["balance_loss"] if "mixture" in CASES[case] else []
    for options in ({}, {"labels": tokens()}, {"labels": tokens(), "output_hidden_states": True}):
        ours, theirs = model(tokens(), **options), stock(tokens(), **options)
        with_balance = extra if "labels" in options else []
        assert list(ours) == list(theirs) + with_balance
        as_tuple = model(tokens(), return_dict=False, **options)
        assert len(as_tuple) == len(ours)
        assert torch.equal(as_tuple[0], ours[0])
        assert as_tuple[0].ndim == (0 if "labels" in options else 3)


@pytest.mark.parametrize("case", [name for name in CASES if "mixture" in name])
@torch.no_grad()
def test_router_scores_are_returned_only_on_request(case: str) -> None:
    model = mixed_model("Llama", CASES[case])
    assert model(tokens(), labels=tokens()).head_router_scores is None
    out = model(tokens(), output_head_router_scores=True)
    assert [scores.shape for scores in out.head_router_scores] == [
        (2, 9, 4 - model.config.mixers["mixture"]["shared_heads"])
    ] * 2
    assert all(scores.sum(-1).allclose(torch.ones(2, 9)) for scores in out.head_router_scores)
    assert out.balance_loss.ndim == 0 and out.loss is None
    model.config.output_head_router_scores = True
    assert len(model(tokens()).head_router_scores) == 2
    assert model(tokens(), output_head_router_scores=False).head_router_scores is None


@torch.no_grad()
def test_balance_loss_accepts_mask_with_past_and_refuses_longer_mask() -> None:
    model = mixed_model("Llama", CASES["mixture"])
    ids, mask = tokens(), torch.ones(2, 9, dtype=torch.long)
    whole = model(ids, attention_mask=mask, labels=ids)
    past = model(ids[:, :4], attention_mask=mask[:, :4]).past_key_values
    rest = model(ids[:, 4:], attention_mask=mask, past_key_values=past, labels=ids[:, 4:])
    assert rest.balance_loss != whole.balance_loss and rest.balance_loss.isfinite()
    longer = torch.cat([mask, torch.zeros(2, 11, dtype=torch.long)], dim=1)
    with pytest.raises(ValueError, match=r"attention_mask .*\(2, 20\).*\(2, 9\)"):
        model(ids, attention_mask=longer, labels=ids)


@torch.no_grad()
def test_balance_loss_with_past_excludes_left_padding() -> None:
    """The second sequence has 3 tokens after 6 of padding, 2 of which follow the past."""
    model, ids, mask = mixed_model("Llama", CASES["mixture"]), tokens(), torch.ones(2, 9, dtype=torch.long)
    mask[1, :6] = 0
    past = model(ids[:, :4], attention_mask=mask[:, :4]).past_key_values
    rest = model(ids[:, 4:], attention_mask=mask, past_key_values=past, output_head_router_scores=True)
    long, short = (model(row[None], output_head_router_scores=True) for row in (ids[0], ids[1, 6:]))
    scores = [
        torch.cat([one[:, 4:], other], dim=1)
        for one, other in zip(long.head_router_scores, short.head_router_scores, strict=True)
    ]
    selected = [torch.zeros_like(layer).scatter(-1, layer.topk(1).indices, 1.0) for layer in scores]
    expected = oracle_routing.balance_loss(list(zip(scores, selected, strict=True)), torch.ones(1, 8))
    torch.testing.assert_close(rest.balance_loss, expected)


@pytest.mark.parametrize(("case", "backbone"), grid(("knocking", "mixture"), BACKBONES, strength=1))
def test_trainer_evaluates_and_predicts(case: str, backbone: str, tmp_path: Path) -> None:
    rows = [{"input_ids": row, "labels": row} for row in tokens(4)]
    predictions_seen: list[Any] = []

    def accuracy(prediction: Any) -> dict[str, float]:
        predictions_seen.append(prediction.predictions)
        right = prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]
        return {"accuracy": float(right.mean())}

    arguments = TrainingArguments(str(tmp_path), per_device_eval_batch_size=2, report_to=[], use_cpu=True)
    model = mixed_model(backbone, CASES[case])
    trainer = Trainer(model=model, args=arguments, eval_dataset=rows, compute_metrics=accuracy)
    metrics = trainer.evaluate()
    with torch.no_grad():
        logits = model(tokens(4)).logits
    assert metrics["eval_accuracy"] == pytest.approx(
        (logits[:, :-1].argmax(-1) == tokens(4)[:, 1:]).float().mean().item()
    )
    predictions = trainer.predict(rows).predictions
    assert isinstance(predictions, numpy.ndarray)
    numpy.testing.assert_allclose(predictions, logits.numpy(), rtol=1e-4, atol=1e-5)
    assert predictions_seen[0].shape == (4, 9, 61)


def test_stock_config_is_refused() -> None:
    for model_class in crosshead.FAMILIES[crosshead.CrossheadLlamaConfig]:
        with pytest.raises(TypeError, match=f"{model_class.__name__}.*LlamaConfig"):
            model_class(LlamaConfig())


@pytest.mark.parametrize("case", ("explicit", "talking"))
def test_past_with_other_head_count_is_refused(case: str) -> None:
    past = stock_model("Llama")(tokens()).past_key_values
    with pytest.raises(ValueError, match=r"\b0\b.*\b2\b.*\b8\b.*\b1\b"):
        mixed_model("Llama", CASES[case])(tokens(), past_key_values=past)


@pytest.mark.parametrize("case", ("knocking", "mixture"))
@pytest.mark.parametrize("reentrant", (True, False))
def test_gradient_checkpointing_of_either_kind_keeps_gradients(reentrant: bool, case: str) -> None:
    """Reentrant checkpointing would lose the balance loss, so mixture uses non-reentrant checkpointing instead."""
    mixers = {
        name: options | ({"balance_weight": 8.0} if name == "mixture" else {}) for name, options in CASES[case].items()
    }
    gradients = []
    for checkpointing in (False, True):
        model = mixed_model("Llama", mixers).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model(tokens(), labels=tokens()).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(checkpointed, plain)


def test_invalid_config_can_be_printed_but_not_saved(tmp_path: Path) -> None:
    config = crosshead.CrossheadLlamaConfig(mixers={"knocking": {}})
    config.mixers = {"knoking": {}}
    assert "knoking" in repr(config)
    with pytest.raises(ValueError, match=r"'knoking'.*'knocking'"):
        config.save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()
