"""Encoders: mechanisms without a causal mask, and task heads whose loss includes the mechanisms' losses."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import Trainer, TrainingArguments

import crosshead
import oracles
from case_grids import for_each_case_and_encoder
from oracle_arithmetic import LayerShape
from oracle_layers import GRADIENT_TOLERANCE, OUTPUT_TOLERANCE, additive, gradients, oracle_view
from tiers import grid
from toys import (
    ENCODER_CASES,
    ENCODER_SIZES,
    ENCODERS,
    EXTRA_SIZES,
    lopsided,
    mixed_config,
    mixed_model,
    tokens,
)

MASK = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
TASKS = {
    "MaskedLM": "logits",
    "SequenceClassification": "logits",
    "TokenClassification": "logits",
    "QuestionAnswering": "start_logits",
    "PreTraining": "prediction_logits",
}
"""Task head -> name of its logits output."""
SECOND_HEAD = {
    "Bert": ("next_sentence_label", "seq_relationship_logits"),
    "Albert": ("sentence_order_label", "sop_logits"),
}
"""Label argument and logits output of the second pretraining head."""
MIXTURE = {"mixture": {"shared_heads": 2, "active_heads": 3}}
NAMES = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "dense": "o_proj"}
"""Names of projections in checkpoints -> names in the oracle."""


def attention_of(model: Any) -> Any:
    """Return the attention module of the last layer."""
    _, parent, name = [*model.base_model._attention_modules()][-1]
    return getattr(parent, name)


@for_each_case_and_encoder
def test_attention_follows_the_oracle(case: str, backbone: str) -> None:
    model = mixed_model(backbone, ENCODER_CASES[case], backend="eager").double()
    attention, config = attention_of(model), model.config
    inputs = torch.randn(2, 7, config.hidden_size, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    inputs.requires_grad_()
    allowed = torch.ones(2, 7, 7, dtype=torch.bool)
    allowed[1, :, 4:] = False
    weights = {
        f"{NAMES.get(name.split('.')[0], name.split('.')[0])}.{name.split('.', 1)[1]}": weight
        for name, weight in attention.named_parameters()
    }
    if backbone == "Bert":  # its output projection is not part of the attention module
        weights["o_proj.weight"] = torch.eye(attention(inputs, attention_mask=additive(allowed))[0].shape[-1]).double()
    mixers, _ = oracle_view(config, attention.layer_idx)
    shape = LayerShape(4, 4, 8, attention.layer_idx, config.layer_norm_eps, has_qk_norm=False)
    expected, _ = oracles.attention_layer(inputs, weights, shape, mixers, None, None, allowed)
    if backbone == "Albert":
        expected = attention.LayerNorm(inputs + expected)
    assert expected.abs().max() > 0.1
    named = {"inputs": inputs, **dict(attention.named_parameters())}
    truth = gradients(expected, named)
    for backend in ("eager", "sdpa"):
        model.set_attn_implementation(backend)
        mask = additive(allowed) if backend == "eager" else allowed[:, None]
        output, _ = attention(inputs, attention_mask=mask)
        assert (output - expected).abs().max() < OUTPUT_TOLERANCE, backend
        for name, gradient in gradients(output, named).items():
            assert (gradient - truth[name]).abs().max() < GRADIENT_TOLERANCE, (backend, name)


@for_each_case_and_encoder
@torch.no_grad()
def test_attention_is_bidirectional_and_ignores_padding(case: str, backbone: str) -> None:
    for backend in ("eager", "sdpa"):
        model = mixed_model(backbone, ENCODER_CASES[case], backend=backend)
        ids, changed = tokens(), tokens()
        changed[:, 5:] = tokens(seed=2)[:, 5:]
        assert (model(ids).logits - model(changed).logits).abs().amax((0, 2)).min() > 1e-4
        padded = model(ids, attention_mask=MASK).logits[1:, :6]
        assert (padded - model(ids[1:, :6]).logits).abs().max() < 1e-4


@pytest.mark.parametrize("backbone", ENCODERS)
@pytest.mark.parametrize("task", TASKS)
def test_task_head_loss_includes_balance_loss(backbone: str, task: str, tmp_path: Path) -> None:
    auto_class = getattr(transformers, f"AutoModelFor{task}")
    count = 2 if task in ("QuestionAnswering", "PreTraining") else 3
    torch.manual_seed(0)
    model = auto_class.from_config(mixed_config(backbone, MIXTURE, num_labels=count), attn_implementation="eager")
    assert type(model) is getattr(crosshead, f"Crosshead{backbone}For{task}")
    labels: dict[str, Any] = {
        "MaskedLM": {"labels": tokens(seed=3)},
        "SequenceClassification": {"labels": torch.tensor([0, 2])},
        "TokenClassification": {"labels": tokens(seed=3) % count},
        "QuestionAnswering": {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])},
        "PreTraining": {"labels": tokens(seed=3), SECOND_HEAD[backbone][0]: torch.tensor([0, 1])},
    }[task]
    out = model(tokens(), attention_mask=MASK, output_head_router_scores=True, **labels)
    assert len(out.head_router_scores) == 2
    scores = torch.stack(out.head_router_scores)[:, MASK.bool()]
    selected = torch.zeros_like(scores).scatter(-1, scores.topk(1, -1).indices, 1.0)
    expected = (scores.mean(1) * selected.mean(1)).sum(-1).mean()
    assert torch.allclose(out.balance_loss, expected)
    without = type(model)(
        mixed_config(backbone, {"mixture": {**MIXTURE["mixture"], "balance_weight": 0.0}}, num_labels=count)
    )
    without.load_state_dict(model.state_dict())
    plain = without(tokens(), attention_mask=MASK, **labels)
    assert torch.allclose(out.loss - plain.loss, 0.01 * expected, atol=1e-6)
    out.loss.backward()
    routers = [parameter for name, parameter in model.named_parameters() if ".mixers." in name]
    assert routers and all(parameter.grad.abs().max() > 0 for parameter in routers)
    as_tuple = model(tokens(), attention_mask=MASK, return_dict=False, **labels)
    assert torch.equal(as_tuple[0], model(tokens(), attention_mask=MASK, **labels).loss)
    model.eval().save_pretrained(tmp_path)
    again = auto_class.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert torch.equal(again(tokens())[TASKS[task]], model(tokens())[TASKS[task]])
    alone = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert type(alone) is getattr(crosshead, f"Crosshead{backbone}Model")
    assert torch.equal(alone(tokens()).last_hidden_state, model.base_model(tokens()).last_hidden_state)


@pytest.mark.oldest
@pytest.mark.parametrize("backbone", ENCODERS)
@torch.no_grad()
def test_pretraining_heads_without_mechanisms_equal_stock(backbone: str, tmp_path: Path) -> None:
    label, logits = SECOND_HEAD[backbone]
    config = getattr(transformers, f"{backbone}Config")(**ENCODER_SIZES, **EXTRA_SIZES.get(backbone, {}))
    stock = lopsided(getattr(transformers, f"{backbone}ForPreTraining")(config)).eval()
    stock.save_pretrained(tmp_path)
    ours_class = getattr(crosshead, f"Crosshead{backbone}ForPreTraining")
    ours, labels = ours_class.from_pretrained(tmp_path).eval(), {"labels": tokens(seed=3), label: torch.tensor([0, 1])}
    output, expected = ours(tokens(), attention_mask=MASK, **labels), stock(tokens(), attention_mask=MASK, **labels)
    for name in ("loss", "prediction_logits", logits):
        assert torch.equal(output[name], expected[name]), name


@pytest.mark.parametrize("backbone", ENCODERS)
@torch.no_grad()
def test_remote_code_of_pretraining_model_gives_the_same_logits(
    backbone: str, warm_process: Any, tmp_path: Path
) -> None:
    config = mixed_config(backbone, MIXTURE)
    model = getattr(crosshead, f"Crosshead{backbone}ForPreTraining")(config).eval()
    model.set_attn_implementation("eager")
    model.save_pretrained(tmp_path / "model")
    save_file({"ids": tokens()}, tmp_path / "inputs.safetensors")
    worker = Path(__file__).with_name("remote_code_worker.py")
    command, environment = [sys.executable, "-P", str(worker), str(tmp_path)], os.environ | {"HF_HUB_OFFLINE": "1"}
    done = warm_process.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert torch.equal(load_file(tmp_path / "outputs.safetensors")["logits"], model(tokens()).prediction_logits)


@pytest.mark.parametrize(("backbone", "case"), grid(ENCODERS, ENCODER_CASES, strength=1))
def test_gradient_checkpointing_gives_the_same_gradients(backbone: str, case: str) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = mixed_model(backbone, ENCODER_CASES[case]).train()
        if checkpointing and model.supports_gradient_checkpointing:
            model.gradient_checkpointing_enable()
        model(tokens(), labels=tokens()).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for first, second in zip(*gradients, strict=True):
        assert torch.allclose(first, second, atol=1e-6)


@pytest.mark.parametrize("backbone", ENCODERS)
def test_trainer_accumulates_balance_loss_over_micro_batches(backbone: str, tmp_path: Path) -> None:
    """Accumulation over two micro-batches gives the same update as one batch, including the balance loss."""
    rows = [{"input_ids": row, "labels": row} for row in tokens(4)]
    trained = []
    for size, steps in ((4, 1), (2, 2)):
        model = mixed_model(backbone, MIXTURE)
        options: dict[str, Any] = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
        arguments = TrainingArguments(
            str(tmp_path),
            max_steps=1,
            report_to=[],
            optim="sgd",
            learning_rate=0.1,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            **options,
        )
        Trainer(model, arguments, train_dataset=rows).train()  # type: ignore[arg-type]
        trained.append(model.state_dict())
    start = mixed_model(backbone, MIXTURE).state_dict()
    for name, weight in trained[0].items():
        if ".mixers." in name:
            assert not torch.equal(weight, start[name]), name
            # The balance loss is a product of means: for a batch it is close, not equal, to the mean over its halves.
            assert functional.cosine_similarity(weight - start[name], trained[1][name] - start[name], 1).min() > 0.9


def test_albert_layers_share_mechanism_parameters() -> None:
    model = mixed_model("Albert", {"knocking": {}})
    assert [name for name, _ in model.named_parameters() if name.endswith("knocking.value.up.weight")] == [
        "albert.encoder.albert_layer_groups.0.albert_layers.0.attention.mixers.knocking.value.up.weight"
    ]


@pytest.mark.parametrize(
    ("backbone", "mixers", "changes", "key"),
    [
        ("Albert", {"knocking": {"layers": [0]}}, {}, "mixers.knocking.layers"),
        ("Albert", {"mixture": {"active_heads": [3, 3]}}, {}, "mixers.mixture.active_heads"),
        ("Albert", {"explicit": {"value_heads": [2, 2]}}, {}, "mixers.explicit.value_heads"),
        ("Bert", {"knocking": {}}, {"is_decoder": True}, "is_decoder"),
        ("Bert", {"differential": {"version": 2}}, {}, "num_attention_heads"),
        ("Bert", {"differential": {}}, {"attention_probs_dropout_prob": 0.1}, "mixers.differential"),
    ],
)
def test_unsupported_configs_are_refused(
    backbone: str, mixers: dict[str, Any], changes: dict[str, Any], key: str
) -> None:
    with pytest.raises(ValueError, match=key):
        mixed_config(backbone, mixers, **changes)


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 32])
@torch.no_grad()
def test_blockwise_talking_equals_eager_for_any_head_count(heads: int) -> None:
    """The paper's table 7 has up to as many heads as features, i.e. heads of size 1."""
    model = mixed_model("Bert", {"talking": {}}, backend="sdpa", num_attention_heads=heads)
    eager = mixed_model("Bert", {"talking": {}}, num_attention_heads=heads)
    assert (
        model(tokens(), attention_mask=MASK).logits - eager(tokens(), attention_mask=MASK).logits
    ).abs().max() < 1e-3


@torch.no_grad()
def test_talking_with_head_size_one_gives_finite_outputs() -> None:
    config = crosshead.CrossheadBertConfig(
        vocab_size=61, num_hidden_layers=1, num_attention_heads=768, intermediate_size=64, mixers={"talking": {}}
    )
    model = lopsided(crosshead.CrossheadBertModel(config)).eval()
    hidden = model(tokens()).last_hidden_state
    assert hidden.shape == (2, 9, 768) and hidden.isfinite().all()
