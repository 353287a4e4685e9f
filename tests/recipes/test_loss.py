"""The loss of a training step against its terms, computed separately."""

import pytest
import torch
from torch.nn import functional

from crosshead.modeling.mechanisms.mixture import balance_loss
from crosshead.modeling.model import IGNORED_LABEL
from crosshead.recipes.schema.recipe import load_recipe
from crosshead.recipes.schema.sections import Distillation
from crosshead.recipes.trainer.load_balance import HeadRouting, load_metrics
from crosshead.recipes.trainer.loss import (
    TrainingLoss,
    attention_errors,
    attention_states,
)
from crosshead.recipes.trainer.teacher_logits import INDICES, LOG_PROBS
from crosshead.recipes.trainer.text_objectives import NextToken
from toys import CASES, mixed_model, stock_model, tokens

RECIPE = load_recipe("small/smollm2_mixture")

BALANCE_WEIGHT = 8.0
ROUTED = {"mixture": CASES["mixture"]["mixture"] | {"balance_weight": BALANCE_WEIGHT}}
ITEMS = torch.tensor(40)


def batch():
    """Return a batch of four sequences with different numbers of predicted tokens."""
    ids = tokens(4, 9)
    labels = ids.clone()
    labels[:, 0] = labels[1, 5:] = labels[3, :7] = IGNORED_LABEL
    return {"input_ids": ids, "labels": labels}


def micro_batches(count):
    return [
        dict(zip(batch(), values, strict=True))
        for values in zip(*(x.split(count) for x in batch().values()), strict=True)
    ]


def loss_and_model(mixers, **distillation):
    model = mixed_model("Llama", mixers).train()
    options = Distillation(teacher="toy", **distillation) if distillation else None
    return TrainingLoss(NextToken(RECIPE), HeadRouting.of(model.config), options, stock_model("Llama")), model


def cross_entropy(logits, labels):
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def expected_balance_loss(model, inputs):
    """Return the balance loss: each sequence's loss times its share of the predicted tokens of the step."""
    total = 0.0
    for ids, labels in zip(inputs["input_ids"], inputs["labels"], strict=True):
        scores = model(ids[None], output_head_router_scores=True).head_router_scores
        count = (labels[1:] != IGNORED_LABEL).sum()
        total = total + balance_loss(scores, [1] * len(scores), None) * count / ITEMS
    return BALANCE_WEIGHT * total


@pytest.mark.parametrize("mixers", [CASES["knocking"], ROUTED])
def test_loss_is_next_token_plus_balance_of_each_sequence(mixers):
    loss_fn, model = loss_and_model(mixers)
    loss, outputs = loss_fn(model, batch(), ITEMS, 0)
    expected = cross_entropy(outputs["logits"], batch()["labels"]) / ITEMS
    if "mixture" in mixers:
        expected = expected + expected_balance_loss(model, batch())
    torch.testing.assert_close(loss, expected)


def test_distillation_weight_splits_next_token_and_divergence():
    loss_fn, model = loss_and_model(ROUTED, weight=0.3, temperature=2.0)
    loss, outputs = loss_fn(model, batch(), ITEMS, 0)
    labels, teacher = batch()["labels"], stock_model("Llama")(batch()["input_ids"]).logits
    keep = labels[:, 1:] != IGNORED_LABEL
    student, target = ((x[:, :-1][keep] / 2.0).log_softmax(-1) for x in (outputs["logits"], teacher))
    divergence = 4.0 * functional.kl_div(student, target, reduction="sum", log_target=True)
    expected = (0.7 * cross_entropy(outputs["logits"], labels) + 0.3 * divergence) / ITEMS + expected_balance_loss(
        model, batch()
    )
    torch.testing.assert_close(loss, expected)


def test_teacher_with_weight_zero_runs_only_in_transfer(monkeypatch):
    loss_fn, model = loss_and_model(ROUTED, weight=0.0, transfer_steps=1)
    ran = []
    run_teacher = TrainingLoss._run_teacher
    monkeypatch.setattr(TrainingLoss, "_run_teacher", lambda *arguments: ran.append(1) or run_teacher(*arguments))
    assert loss_fn(model, batch(), ITEMS, 0)[0].isfinite() and ran == [1]
    loss_fn.finish()
    torch.testing.assert_close(
        loss_fn(model, batch(), ITEMS, 1)[0], loss_and_model(ROUTED)[0](model, batch(), ITEMS, 0)[0]
    )
    assert ran == [1]


def test_loss_from_stored_logits_equals_live_teacher():
    loss_fn, model = loss_and_model(ROUTED, weight=0.3)
    expected, _ = loss_fn(model, batch(), ITEMS, 0)
    stored = stock_model("Llama")(batch()["input_ids"]).logits.log_softmax(-1).topk(61, dim=-1)
    alone = TrainingLoss(
        NextToken(RECIPE), HeadRouting.of(model.config), Distillation(logits="folder", weight=0.3), None
    )
    loss, _ = alone(model, batch() | {INDICES: stored.indices, LOG_PROBS: stored.values}, ITEMS, 0)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)


def test_attention_matching_precedes_distillation():
    loss_fn, model = loss_and_model(ROUTED, weight=0.3, match_steps=2)
    losses = [loss_fn(model, batch(), ITEMS, step)[0] for step in range(3)]
    teacher, ids = stock_model("Llama"), batch()["input_ids"]
    with attention_states(teacher) as (_, targets), attention_states(model) as (_, outputs):
        teacher(ids)
        model(ids)
    shares = (batch()["labels"][:, 1:] != IGNORED_LABEL).sum(1) / ITEMS
    torch.testing.assert_close(losses[0], (attention_errors(outputs, targets) * shares).sum())
    assert losses[0] == losses[1] != losses[2]
    model.zero_grad()
    losses[0].backward()
    # The gradient is zero instead of None, since data parallelism waits for all gradients.
    assert model.lm_head.weight.grad.abs().max() == 0
    assert model.model.layers[1].self_attn.q_proj.weight.grad.abs().max() > 0


@pytest.mark.parametrize("case", ["mixture", "differential", "paired queries"])
def test_transfer_trains_each_attention_on_teacher_inputs(case):
    """The loss compares each student attention with the teacher's on the teacher's inputs; matching follows."""
    loss_fn, model = loss_and_model(CASES[case], transfer_steps=1, match_steps=1)
    loss, _ = loss_fn(model, batch(), ITEMS, 0)
    loss.backward()
    loss_fn.finish()
    teacher, ids = stock_model("Llama"), batch()["input_ids"]
    with attention_states(teacher) as (inputs_of_layers, targets):
        teacher(ids)
    tables = teacher.model.rotary_emb(inputs_of_layers[0], torch.arange(9)[None])
    mask = torch.full((9, 9), torch.finfo(torch.float32).min).triu(1)[None, None]
    outputs = [
        layer.self_attn(hidden_states=inputs, position_embeddings=tables, attention_mask=mask)[0]
        for layer, inputs in zip(model.model.layers, inputs_of_layers, strict=True)
    ]
    shares = (batch()["labels"][:, 1:] != IGNORED_LABEL).sum(1) / ITEMS
    torch.testing.assert_close(loss, (attention_errors(outputs, targets) * shares).sum())
    moved = {name for name, parameter in model.named_parameters() if parameter.grad.any()}
    assert moved and all(".self_attn." in name for name in moved)
    matched, _ = loss_fn(model, batch(), ITEMS, 1)
    assert matched != loss and not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("count", [1, 2])
def test_micro_batch_losses_and_gradients_add_up(step, count):
    loss_fn, model = loss_and_model(ROUTED, weight=0.3, match_steps=1)
    whole, _ = loss_fn(model, batch(), ITEMS, step)
    together = sum(loss_fn(model, part, ITEMS, step)[0] for part in micro_batches(count))
    torch.testing.assert_close(together, whole)
    gradients = [
        torch.autograd.grad(loss, model.model.layers[0].self_attn.mixers["mixture"].routed.weight)[0]
        for loss in (whole, together)
    ]
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().max() > 0 or step == 0


@pytest.mark.parametrize("ours", [False, True])
def test_micro_batch_losses_of_mixture_of_experts_add_up(ours):
    """Also of a stock model, whose own loss would add the full expert balance loss for each micro batch."""
    options = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    model = mixed_model("Qwen3Moe", CASES["knocking"], **options) if ours else stock_model("Qwen3Moe", **options)
    model.train()
    loss_fn = TrainingLoss(NextToken(RECIPE), HeadRouting.of(model.config), None, None)
    whole, outputs = loss_fn(model, batch(), ITEMS, 0)
    share = (batch()["labels"][:, 1:] != IGNORED_LABEL).sum() / ITEMS
    expected = cross_entropy(outputs["logits"], batch()["labels"]) / ITEMS + 0.5 * outputs["aux_loss"] * share
    torch.testing.assert_close(whole, expected)
    alike = [{name: value[:1] for name, value in batch().items()}] * 4  # equal micro batches have equal balance losses
    joined = {name: torch.cat([each[name] for each in alike]) for name in alike[0]}
    torch.testing.assert_close(
        sum(loss_fn(model, each, ITEMS, 0)[0] for each in alike), loss_fn(model, joined, ITEMS, 0)[0]
    )


def test_evaluation_loss_is_next_token_only():
    _, model = loss_and_model(ROUTED)
    with torch.no_grad():
        logits = model(batch()["input_ids"]).logits
    for row, (loss, count) in enumerate(NextToken(RECIPE).evaluate(model, batch())["loss"]):
        own = batch()["labels"][row : row + 1]
        assert loss == pytest.approx(cross_entropy(logits[row : row + 1], own).item(), rel=1e-5)
        assert count == (own[:, 1:] != IGNORED_LABEL).sum()


def test_micro_batch_without_predictions_has_zero_loss():
    loss_fn, model = loss_and_model(ROUTED, weight=0.3)
    nothing = batch() | {"labels": torch.full((4, 9), IGNORED_LABEL)}
    assert loss_fn(model, nothing, ITEMS, 0)[0] == 0


def test_head_routing_skips_layers_without_router():
    mixers = {"mixture": {"shared_heads": 1, "active_heads": 3, "layers": [1]}}
    assert HeadRouting.of(mixed_model("Llama", mixers).config).layers == (1,)


def test_head_load_metrics_of_routed_heads():
    routing = HeadRouting.of(mixed_model("Llama", {"mixture": {"shared_heads": 1, "active_heads": 3}}).config)
    first = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], [[0.6, 0.1, 0.3], [0.4, 0.5, 0.1]]])
    loads = routing.load([first, torch.tensor([[[0.5, 0.3, 0.2]]])])
    assert load_metrics("head_load", dict(zip((0, 3), loads, strict=True))) == {
        "head_load/0/least": 0.5,  # of 4 tokens, 2 select the last head and 3 each of the others
        "head_load/0/most": 0.75,
        "head_load/3/least": 0.0,
        "head_load/3/most": 1.0,
    }


def test_layers_with_only_shared_heads_have_no_load():
    """As in TransNeXt's first stages in MoH-ViT; the balance loss is the mean over the other layers."""
    mixture = {"mixture": {"active_heads": [4, 3], "shared_heads": [4, 1]}}
    model = mixed_model("Bert", mixture)
    routing = HeadRouting.of(model.config)
    out = model(tokens(), output_head_router_scores=True)
    assert [scores.shape[-1] for scores in out.head_router_scores] == [0, 3]
    loads = routing.load(routing.scores(out))
    assert routing.layers == (1,) and [len(load) for load in loads] == [3]
    assert set(load_metrics("head_load", dict(zip(routing.layers, loads, strict=True)))) == {
        "head_load/1/least",
        "head_load/1/most",
    }
    alone = sum(model(row[None], output_head_router_scores=True).balance_loss for row in tokens()) / 2
    torch.testing.assert_close(routing.loss_by_sequence(out, torch.tensor([0.5, 0.5])), 0.01 * alone)
    shared = mixed_model("Bert", {"mixture": {"active_heads": 4, "shared_heads": 4}}).config
    assert HeadRouting.of(shared) is None
