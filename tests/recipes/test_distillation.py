"""Distillation losses against plain formulas in float64."""

import pytest
import torch

from crosshead.modeling.model import IGNORED_LABEL
from crosshead.recipes.trainer import loss as loss_module
from crosshead.recipes.trainer.loss import (
    attention_errors,
    attention_states,
    divergence_minus_loss,
)
from crosshead.recipes.trainer.objective import count_predictions
from toys import CASES, mixed_model, stock_model, tokens

VOCABULARY = 13


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(loss_module, "ROWS", 5)  # blocks that do not end at the ends of sequences


def random_tensor(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2


def logits_labels_teacher():
    labels = torch.randint(0, VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(1))
    labels[0, :3] = labels[1, 4] = labels[2, 1:] = IGNORED_LABEL
    return random_tensor(3, 7, VOCABULARY, seed=2), labels, random_tensor(3, 7, VOCABULARY, seed=3)


def predicted_positions(labels):
    """Return (sequence, position, next token) of each position whose next token has a label."""
    return [
        (row, position, int(labels[row, position + 1]))
        for row in range(labels.shape[0])
        for position in range(labels.shape[1] - 1)
        if labels[row, position + 1] != IGNORED_LABEL
    ]


def kl_divergence(logits, teacher, temperature=1.0):
    """Return the KL divergence `sum p log(p / q)`, computed in a loop."""
    p, q = ((x.double() / temperature).exp() / (x.double() / temperature).exp().sum() for x in (teacher, logits))
    return sum(p[token] * (p[token] / q[token]).log() for token in range(len(p)))


def cross_entropy(logits, token):
    return -(logits.double().exp()[token] / logits.double().exp().sum()).log()


@pytest.mark.parametrize("temperature", [1.0, 2.5, 0.5])
def test_divergence_minus_loss_equals_reference_formula(temperature):
    logits, labels, teacher = logits_labels_teacher()
    loss = divergence_minus_loss(logits.requires_grad_(), labels, (teacher,), temperature)
    own = logits.detach().double().requires_grad_()
    expected = sum(
        kl_divergence(own[row, position], teacher[row, position], temperature) * temperature**2
        - cross_entropy(own[row, position], token)
        for row, position, token in predicted_positions(labels)
    )
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(logits.grad.double(), own.grad, rtol=1e-4, atol=1e-5)


def test_equal_teacher_has_zero_divergence():
    logits, labels, _ = logits_labels_teacher()
    loss = divergence_minus_loss(logits, labels, (logits,), 2.0)
    expected = sum(cross_entropy(logits[row, position], token) for row, position, token in predicted_positions(labels))
    assert loss.item() == pytest.approx(-expected.item(), rel=1e-5)


def test_tokens_beyond_teacher_vocabulary_have_probability_zero():
    logits, labels, teacher = logits_labels_teacher()
    unlikely = torch.full((3, 7, 4), -1e9)
    expected = divergence_minus_loss(logits, labels, (torch.cat([teacher[..., :9], unlikely], -1),), 1.5)
    torch.testing.assert_close(divergence_minus_loss(logits, labels, (teacher[..., :9],), 1.5), expected)


def test_stored_logits_of_whole_vocabulary_equal_live_teacher():
    logits, labels, teacher = logits_labels_teacher()
    stored = teacher.log_softmax(-1).topk(VOCABULARY, dim=-1)
    loss = divergence_minus_loss(logits, labels, (stored.indices, stored.values), 1.0)
    torch.testing.assert_close(loss, divergence_minus_loss(logits, labels, (teacher,), 1.0), rtol=1e-5, atol=1e-4)


def test_tokens_outside_stored_top_k_count_as_one_outcome():
    logits, labels, teacher = logits_labels_teacher()
    stored = teacher.log_softmax(-1).topk(4, dim=-1)
    loss = divergence_minus_loss(logits, labels, (stored.indices, stored.values), 1.0)
    expected = 0.0
    for row, position, token in predicted_positions(labels):
        top = stored.indices[row, position].tolist()
        both = [x[row, position].double().softmax(-1) for x in (teacher, logits)]
        p, q = ([*(x[index] for index in top), 1 - sum(x[index] for index in top)] for x in both)
        expected += sum(a * (a / b).log() for a, b in zip(p, q, strict=True)) - cross_entropy(
            logits[row, position], token
        )
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_predictions_are_counted_per_sequence():
    _, labels, _ = logits_labels_teacher()
    assert count_predictions(labels).tolist() == [
        sum(row == each for each, _, _ in predicted_positions(labels)) for row in range(3)
    ]


def test_attention_errors_equal_reference_formula():
    outputs, targets = ([random_tensor(2, 3, 4, seed=seed + layer) for layer in range(2)] for seed in (5, 8))
    expected = [
        sum(((a[row] - b[row]) ** 2).sum() / (b[row] ** 2).sum() for a, b in zip(outputs, targets, strict=True)) / 2
        for row in range(2)
    ]
    torch.testing.assert_close(attention_errors(outputs, targets), torch.stack(expected))


def attention_outputs(model, ids):
    with attention_states(model) as (_, outputs):
        model(ids, use_cache=False)
    return outputs


def test_same_model_has_zero_attention_error():
    model, ids = stock_model("Llama"), tokens()
    outputs, targets = attention_outputs(model, ids), attention_outputs(model, ids)
    assert len(outputs) == 2 and outputs[0].shape == (2, 9, 24)
    assert attention_errors(outputs, targets).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("case", ["knocking", "mixture", "differential"])
def test_attention_matching_has_gradients_only_at_and_below_attention(case):
    student, ids = mixed_model("Llama", CASES[case]), tokens()
    teacher = stock_model("Llama")
    with torch.no_grad():
        targets = attention_outputs(teacher, ids)
    attention_errors(attention_outputs(student, ids), targets).sum().backward()
    moved = {name for name, parameter in student.named_parameters() if parameter.grad is not None}
    above = {name for name in dict(student.named_parameters()) if name.startswith(("lm_head", "model.norm"))}
    above |= {
        name
        for name, _ in student.named_parameters()
        if name.startswith("model.layers.1.") and "self_attn" not in name
    }
    assert above - moved == above - {"model.layers.1.input_layernorm.weight"}
    assert moved >= {name for name, _ in student.named_parameters() if "self_attn" in name or "layers.0" in name}


def test_attention_hooks_are_removed_after_an_error():
    model = stock_model("Llama")
    with pytest.raises(KeyError), attention_states(model):
        raise KeyError
    assert not any(module._forward_hooks for module in model.modules())
