"""Training with transformers' Trainer and accelerate: accumulation, activation checkpointing, balance loss."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.nn import functional
from transformers import Trainer, TrainingArguments

from case_grids import for_compositions, for_each_case_and_decoder
from tiers import first, grid
from toys import CASES, lopsided, mixed_model, mixers_of

ROUTED: dict[str, dict[str, Any]] = {
    "two_stage": CASES["mixture"],
    "query_norm": CASES["knocking+mixture"],
    "paper": CASES["explicit+talking+mixture"],
    "one_layer": {"mixture": {"shared_heads": 0, "active_heads": 2, "layers": [1]}},
}
for_every_router = pytest.mark.parametrize("router", ROUTED)
BALANCE_WEIGHT = 8.0  # makes the balance loss as large as the cross-entropy, so that double counting is detected


def with_balance_weight(mixers: dict[str, Any], balance_weight: float) -> dict[str, Any]:
    """Return the mixers with another weight of the balance loss, if they have `mixture`."""
    routing = {"mixture": mixers["mixture"] | {"balance_weight": balance_weight}} if "mixture" in mixers else {}
    return mixers | routing


def model_of(mixers: dict[str, Any], checkpointing: bool = False, backbone: str = "Llama") -> Any:
    """Return a toy model in training mode."""
    model = mixed_model(backbone, mixers).train()
    if checkpointing:
        # Newer transformers deprecate the old name.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
    return model


def batch(rows: int = 8, length: int = 9) -> dict[str, torch.Tensor]:
    """Return sequences of different lengths, alternately padded left and right; some labels are ignored."""
    generator = torch.Generator().manual_seed(4)
    input_ids = torch.randint(1, 61, (rows, length), generator=generator)
    mask = torch.ones_like(input_ids)
    for row in range(rows):
        padding = slice(0, row % 5) if row % 2 else slice(length - row % 5, length)
        mask[row, padding] = 0
    labels = input_ids.masked_fill(mask == 0, -100)
    labels[0, :6] = labels[3, 2:] = labels[5, 4:6] = -100
    return {"input_ids": input_ids * mask, "attention_mask": mask, "labels": labels}


def micro_batches(whole: dict[str, torch.Tensor], count: int) -> list[dict[str, torch.Tensor]]:
    """Split a batch into `count` micro-batches."""
    pieces = {name: tensor.chunk(count) for name, tensor in whole.items()}
    return [{name: pieces[name][index] for name in pieces} for index in range(count)]


def predicted_token_count(inputs: dict[str, torch.Tensor]) -> int:
    """Return the number of predicted tokens (labels that are not ignored, after the shift)."""
    return int(inputs["labels"][:, 1:].ne(-100).sum())


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Return the gradients by parameter name."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def copied_parameters(model: Any) -> dict[str, torch.Tensor]:
    """Return a copy of the parameters by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def reference_balance_loss(model: Any, scores: tuple[torch.Tensor, ...], mask: torch.Tensor) -> torch.Tensor:
    """Return `sum_i P_i f_i` over the real tokens, averaged over the routed layers; `scores` are (B, T, heads)."""
    settings = model.config.mixers["mixture"]
    selected = settings["active_heads"] - settings["shared_heads"]
    layers = []
    for layer in scores:
        real = layer[mask.bool()]
        ranks = real.argsort(dim=-1, descending=True).argsort(dim=-1)
        layers.append((real.mean(0) * (ranks < selected).to(real).mean(0)).sum())
    return torch.stack(layers).mean()


def reference_loss(model: Any, batches: list[dict[str, torch.Tensor]], shares: list[float]) -> torch.Tensor:
    """Return the sum over micro-batches of share * (cross-entropy + balance loss); leave gradients in the model."""
    total = torch.zeros(())
    for inputs, share in zip(batches, shares, strict=True):
        arguments = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        output = model(**arguments, use_cache=False, output_head_router_scores=True)
        loss = functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
        if output.head_router_scores:
            balance = reference_balance_loss(model, output.head_router_scores, inputs["attention_mask"])
            loss = loss + model.config.mixers["mixture"]["balance_weight"] * balance
        (share * loss).backward()
        total += share * loss.detach()
    return total


def trainer_for(model: Any, folder: Path, **options: Any) -> Trainer:
    """Return a transformers Trainer on the CPU over the rows of `batch()`."""
    rows = [{name: tensor[row] for name, tensor in batch().items()} for row in range(8)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_nan_inf_filter=False,
        **options,
    )
    return Trainer(model=model, args=arguments, train_dataset=rows)


def train_one_step(model: Any, folder: Path, accumulation: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Run one optimizer step over `batch()` in `accumulation` micro-batches; return the loss and the gradients."""
    trainer = trainer_for(
        model,
        folder,
        max_steps=1,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        per_device_train_batch_size=8 // accumulation,
        gradient_accumulation_steps=accumulation,
        train_sampling_strategy="sequential",
        save_strategy="no",
    )
    before = copied_parameters(model)
    loss = trainer.train().training_loss
    after = copied_parameters(model)
    return loss, {name: before[name] - after[name] for name in before}


def assert_same(result: Any, expected: Any) -> None:
    """Assert equality up to the rounding of sums in another order."""
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=5e-6)


@for_each_case_and_decoder
def test_activation_checkpointing_keeps_loss_and_gradients(case: str, backbone: str) -> None:
    losses, gradients_by_run = [], []
    for checkpointing in (False, True):
        model = model_of(with_balance_weight(mixers_of(case, backbone), BALANCE_WEIGHT), checkpointing, backbone)
        loss = model(**batch(), use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
        gradients_by_run.append(gradients(model))
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=0)
    torch.testing.assert_close(gradients_by_run[1], gradients_by_run[0], rtol=0, atol=1e-7)


@for_compositions
def test_accumulated_micro_batches_equal_the_large_batch(case: str, tmp_path: Path) -> None:
    mixers = with_balance_weight(CASES[case], 0.0)
    plain = model_of(mixers)
    expected = plain(**batch(), use_cache=False).loss
    expected.backward()
    for accumulation in (1, 4):
        loss, applied = train_one_step(model_of(mixers), tmp_path, accumulation)
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        assert_same(applied, gradients(plain))


@pytest.mark.oldest
@pytest.mark.parametrize(
    ("router", "accumulation", "checkpointing"), grid(ROUTED, (1, 2, 4), (False, True), strength=1)
)
def test_trainer_counts_the_balance_loss_once(
    router: str, accumulation: int, checkpointing: bool, tmp_path: Path
) -> None:
    mixers = with_balance_weight(ROUTED[router], BALANCE_WEIGHT)
    plain, pieces = model_of(mixers), micro_batches(batch(), accumulation)
    expected = reference_loss(
        plain, pieces, [predicted_token_count(piece) / predicted_token_count(batch()) for piece in pieces]
    )
    loss, applied = train_one_step(model_of(mixers, checkpointing), tmp_path, accumulation)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert_same(applied, gradients(plain))


@pytest.mark.parametrize("router", first(ROUTED, 2))
def test_accelerate_loop_counts_the_balance_loss_once(router: str) -> None:
    mixers = with_balance_weight(ROUTED[router], BALANCE_WEIGHT)
    plain, pieces = model_of(mixers), micro_batches(batch(), 4)
    expected = reference_loss(plain, pieces, [1 / 4] * 4)
    AcceleratorState._reset_state(reset_partial_state=True)  # an earlier Trainer may have set its precision
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = accelerator.prepare(model_of(mixers))
    losses = []
    for piece in pieces:
        with accelerator.accumulate(model):
            loss = model(**piece, use_cache=False).loss
            accelerator.backward(loss)
            losses.append(loss.item())
    assert sum(losses) / 4 == pytest.approx(expected.item(), rel=1e-5)
    assert_same(gradients(model), gradients(plain))


@pytest.mark.parametrize(("router", "side"), grid(ROUTED, ("left", "right"), strength=1))
@torch.no_grad()
def test_balance_loss_ignores_padding(router: str, side: str) -> None:
    model = model_of(ROUTED[router])
    sequences = [batch()["input_ids"][row, :length] for row, length in ((0, 9), (2, 4), (6, 6))]
    alone = [model(row[None], output_head_router_scores=True).head_router_scores for row in sequences]
    together = tuple(torch.cat(layer, dim=1) for layer in zip(*alone, strict=True))
    expected = reference_balance_loss(model, together, torch.ones(1, 9 + 4 + 6))
    ids, mask = torch.full((3, 9), 7), torch.zeros(3, 9, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        position = slice(0, len(sequence)) if side == "right" else slice(9 - len(sequence), 9)
        ids[row, position], mask[row, position] = sequence, 1
    output = model(ids, attention_mask=mask, output_head_router_scores=True)
    torch.testing.assert_close(output.balance_loss, expected, rtol=1e-5, atol=0)
    unmasked = model(ids, output_head_router_scores=True).balance_loss
    assert (unmasked - expected).abs() > 1e-3  # padding matters for this input


@pytest.mark.oldest
@for_compositions
def test_resumed_training_gives_same_losses_and_weights(case: str, tmp_path: Path) -> None:
    options = {"per_device_train_batch_size": 2, "max_steps": 4, "save_steps": 2, "logging_steps": 1}
    first = trainer_for(model_of(CASES[case]), tmp_path, **options)
    first.train()
    again = trainer_for(lopsided(model_of(CASES[case]), seed=5), tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    logs = [[entry["loss"] for entry in trainer.state.log_history if "loss" in entry] for trainer in (first, again)]
    assert len(logs[0]) == 4
    assert logs[1] == logs[0]
    torch.testing.assert_close(copied_parameters(again.model), copied_parameters(first.model), rtol=0, atol=0)
    loaded = type(first.model).from_pretrained(tmp_path / "checkpoint-4", attn_implementation="eager")
    with torch.no_grad():
        assert loaded.eval()(**batch()).loss == first.model.eval()(**batch()).loss


@for_compositions
def test_bf16_training_lowers_loss_and_keeps_float32_weights(case: str, tmp_path: Path) -> None:
    model = model_of(CASES[case])
    with torch.no_grad():
        expected = model(**batch()).loss.item()
    before = copied_parameters(model)
    trainer = trainer_for(
        model, tmp_path, bf16=True, max_steps=3, logging_steps=1, per_device_train_batch_size=8, save_strategy="no"
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(expected, rel=0.02)
    assert losses[0] > losses[1] > losses[2]
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert parameter.isfinite().all(), name
        assert not torch.equal(parameter, before[name]), name


@for_every_router
def test_balance_loss_stays_float32_under_autocast(router: str) -> None:
    model = model_of(ROUTED[router])
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**batch(), output_head_router_scores=True)
    expected = reference_balance_loss(model, output.head_router_scores, batch()["attention_mask"])
    assert output.balance_loss.dtype == torch.float32
    torch.testing.assert_close(output.balance_loss, expected, rtol=1e-5, atol=0)
