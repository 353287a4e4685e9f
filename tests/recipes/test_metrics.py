"""Metrics of a run, and the errors that end a run whose loss diverges or is not finite."""

import os
import signal
from math import isfinite
from pathlib import Path

import pytest
import torch

from crosshead.common.errors import RecipeError
from crosshead.recipes.schema.recipe import load_recipe
from crosshead.recipes.schema.sections import LoraOptions, TrainOptions
from crosshead.recipes.train import train as run
from crosshead.recipes.trainer import metrics as module
from crosshead.recipes.trainer import run_trainer
from crosshead.recipes.trainer.checkpoints import checkpoints
from crosshead.recipes.trainer.drift import drift, plain_name, starting_points
from crosshead.recipes.trainer.load_balance import HeadRouting
from crosshead.recipes.trainer.metrics import LossMonitor, MetricsFile
from crosshead.recipes.trainer.parameters import set_trainable
from toy_training import KNOCKING, LORA, MIXTURE, killed, losses, metrics, toy_run, train
from toys import CASES, mixed_model

CALM = [3.0, 2.9, 3.1, 3.0] * 10


def updated_monitor(losses, **options):
    monitor = LossMonitor(**options)
    monitor.update(losses, 1)
    return monitor


def test_loss_monitor_counts_spikes():
    assert updated_monitor(CALM).spikes == 0
    assert (
        updated_monitor([*CALM, 3.6, 3.0, 3.4]).spikes == 1
    )  # after the first spike, the second is within the deviation
    assert updated_monitor([3.0] * 40 + [3.05, 3.0, 3.2]).spikes == 1
    assert updated_monitor([9.0, 3.0, 9.0]).spikes == 0  # nothing to compare with


def test_spike_count_does_not_depend_on_update_frequency():
    monitor = LossMonitor()
    for step, loss in enumerate([*CALM, 4.0, *CALM], 1):
        monitor.update([loss], step)
    assert monitor.spikes == updated_monitor([*CALM, 4.0, *CALM]).spikes == 1


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_non_finite_loss_is_refused(loss):
    with pytest.raises(RecipeError, match=rf"{loss}.*step 13.*train\.learning_rate"):
        LossMonitor().update([3.0, 2.0, loss], 11)


def test_diverged_loss_is_refused():
    updated_monitor([*CALM, *[6.5] * 19, 3.0, *[6.5] * 19])
    with pytest.raises(RecipeError, match=r"6\.50.*step 60.*2\.95"):
        updated_monitor([*CALM, *[6.5] * 20])
    updated_monitor([*[0.02] * 40, *[0.5] * 40])  # a large factor, but a small difference


def test_loss_that_diverges_from_first_step_is_refused():
    with pytest.raises(RecipeError, match=r"25\.00.*step 21.*5\.50"):
        updated_monitor([5.5, *[25.0] * 20])
    updated_monitor([5.5, *[25.0] * 19, 5.0, *CALM])
    updated_monitor([5.5, *[6.4] * 40])


def test_loss_change_resets_spikes_and_divergence():
    match = [0.01] * 40
    assert updated_monitor([*match, *CALM], changes=(40,)).spikes == 0
    with pytest.raises(RecipeError, match="loss"):
        updated_monitor([*match, *CALM], changes=(10,))
    assert updated_monitor([*match, *CALM, *[9.0] * 40], changes=(40, 80)).spikes == 0


def test_recipe_lists_loss_changes_after_transfer_and_match():
    recipe = load_recipe("small/smollm2_explicit", ["distillation.transfer_steps=30", "distillation.match_steps=40"])
    assert recipe.loss_changes == (30, 70) and recipe.attention_loss_steps == 70
    assert load_recipe("small/smollm2_gating").loss_changes == ()


def test_metrics_file_reads_and_truncates_lines(tmp_path):
    file = MetricsFile(tmp_path, 0)
    for step in (2, 4, 6):
        file.write({"step": step, "losses": [step - 0.5, step + 0.5], "loss": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as cut:
        cut.write('{"step": 8, "losses"')
    assert [line["step"] for line in MetricsFile.lines(tmp_path)] == [2, 4, 6]
    assert MetricsFile.losses(tmp_path, 5) == [1.5, 2.5, 3.5, 4.5, 5.5]
    assert MetricsFile.last(tmp_path) == {"step": 6, "loss": 6.0}
    MetricsFile(tmp_path, 4).write({"step": 6})
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 3
    assert [line["step"] for line in MetricsFile.lines(tmp_path)] == [2, 4, 6]
    assert MetricsFile.lines(tmp_path / "nowhere") == []


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"3", b"{}", b'{"step": "a"}', b"[]"])
def test_metrics_lines_after_damaged_line_are_dropped(damage, tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "losses": [2.5]}\n' + damage + b'\n{"step": 3}\n')
    assert MetricsFile.lines(tmp_path) == [{"step": 1, "losses": [2.5]}]


def test_drift_is_relative_distance_from_neutral_start():
    model = mixed_model("Llama", {"knocking": {"form": "linear"}, "mixture": CASES["mixture"]["mixture"]})
    starts = starting_points(model)
    knocking = {f"model.layers.{n}.self_attn.mixers.knocking.value.weight" for n in (0, 1)}
    assert knocking < set(starts)
    assert drift(model, starts)["drift/knocking"] > 0 and drift(model, starts)["drift/mixture"] == 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in knocking:
                parameter.copy_(starts[name])
    assert drift(model, starts) == {"drift/knocking": 0.0, "drift/mixture": 0.0}
    with torch.no_grad():
        model.model.layers[0].self_attn.mixers["knocking"].value.weight.zero_()
    moved = drift(model, starts)["drift/knocking"]
    assert moved == pytest.approx(0.5)  # as far as from its start to zero, in one of two layers


@pytest.mark.parametrize(("options", "neutral"), [({"norm": False}, True), ({"key_heads": 1, "norm": False}, False)])
def test_drift_of_non_neutral_start_begins_at_initial_weights(options, neutral):
    model = mixed_model("Llama", {"explicit": options})
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.mixers["explicit"].key.weight.fill_(3.0)
    assert (drift(model, starting_points(model))["drift/explicit"] == 0) is not neutral


@pytest.mark.parametrize("case", CASES)
def test_every_mechanism_with_parameters_reports_drift(case):
    model = mixed_model("Llama", CASES[case])
    names = {name.split(".mixers.")[1].split(".")[0] for name, _ in model.named_parameters() if ".mixers." in name}
    assert set(drift(model, starting_points(model))) == {f"drift/{name}" for name in names}


@pytest.mark.parametrize("case", CASES)
def test_starting_points_ignore_wrappers_and_keep_random_state(case):
    model = mixed_model("Qwen3", CASES[case])
    before = torch.get_rng_state()
    plain = starting_points(model)
    assert torch.equal(torch.get_rng_state(), before)
    options = TrainOptions(
        learning_rate=1.0, tokens=64, batch_tokens=64, trainable="mixers+lora", lora=LoraOptions(2, 4.0)
    )
    wrapped = set_trainable(model, options)
    assert starting_points(wrapped).keys() == plain.keys()
    assert drift(wrapped, starting_points(wrapped)).keys() == drift(model, plain).keys()
    assert plain_name("module._orig_mod.model.norm.weight") == "model.norm.weight"


@pytest.mark.parametrize("when", ["made", "prepared"])
def test_drift_skips_zero3_partitioned_parameters(when):
    """ZeRO-3 empties parameters, either when the model is made or once training begins."""
    model = mixed_model("Llama", {"knocking": {"form": "linear"}})
    starts = starting_points(model)
    for layer in model.model.layers:
        weight = layer.self_attn.mixers["knocking"].value.weight
        weight.ds_shape, weight.data = weight.shape, torch.empty(0)
    if when == "made":
        starts = starting_points(model)
        assert starts == {}
    assert drift(model, starts) == {}


def test_run_logs_all_metrics_at_expected_steps(tmp_path):
    recipe = toy_run(MIXTURE, tmp_path, 5, watch={"every": 2, "evaluate_every": 4}, checkpoints={"every": 3})
    train(recipe)
    lines = metrics(recipe)
    assert [(line["step"], len(line.get("losses", ())), "eval_loss" in line) for line in lines] == [
        (2, 2, False),
        (3, 1, False),  # metrics are logged before each checkpoint
        (4, 1, False),
        (4, 0, True),
        (5, 1, False),
        (5, 0, True),
    ]
    first = lines[0]
    assert first["loss"] == pytest.approx(sum(first["losses"]) / 2)
    assert first.keys() >= {"grad_norm", "learning_rate", "spikes", "head_load/0/least", "head_load/3/most"}
    assert 0 <= first["head_load/0/least"] <= 3 / 5 <= first["head_load/0/most"] <= 1
    assert "head_load/0/least" in lines[1]  # a checkpoint's line has everything, too


def test_spike_count_continues_after_resume(tmp_path):
    recipe = toy_run(KNOCKING, tmp_path, 4)
    killed(recipe, 3)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(MetricsFile, "losses", classmethod(lambda *_: [*CALM, 9.0]))
        train(recipe)
    assert [line["spikes"] for line in metrics(recipe) if "spikes" in line] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("bad", "name", "words"),
    [
        ((3, "loss"), KNOCKING, "loss.*nan.*step 3"),
        ((3, "gradient"), LORA, "loss.*nan.*step 4.*checkpoint-2"),  # weights damaged in the step before
        ((4, "gradient"), KNOCKING, "norm.*nan.*step 4.*checkpoint-2"),
    ],
)
def test_run_with_nan_loss_or_gradient_stops_and_keeps_checkpoint(bad, name, words, tmp_path, monkeypatch):
    recipe = toy_run(name, tmp_path, 6, watch={"every": 4})
    objective = run_trainer.TrainingLoss.__call__

    def broken(self, model, inputs, items, step):
        loss, outputs = objective(self, model, inputs, items, step)
        if step + 1 == bad[0]:
            nothing = torch.full_like(loss, float("nan"))
            if bad[1] == "loss":
                return loss * nothing, outputs
            loss.register_hook(lambda gradient: nothing)
        return loss, outputs

    monkeypatch.setattr(run_trainer.TrainingLoss, "__call__", broken)
    with pytest.raises(RecipeError, match=words) as caught:
        train(recipe)
    assert "\n" not in str(caught.value)
    (checkpoint,) = checkpoints(Path(recipe.output))
    assert checkpoint.name == "checkpoint-2"
    last = int(words.partition("step ")[2][0])
    finite = last if "norm" in words else last - 1  # earlier losses are logged
    assert len(losses(recipe)) == finite
    assert all(isfinite(loss) for loss in losses(recipe))
    monkeypatch.undo()
    assert train(recipe).model
    assert len(losses(recipe)) == 6 and all(loss < 10 for loss in losses(recipe))


@pytest.fixture
def diverging_loss(monkeypatch):
    """A loss monitor with short memory and little patience, and a loss that is far too high from step 8 on."""
    patch_high_loss(monkeypatch, range(8, 99))


def patch_high_loss(monkeypatch, steps):
    monkeypatch.setattr(module, "RECENT", 4)
    monkeypatch.setattr(module, "PATIENCE", 5)
    objective = run_trainer.TrainingLoss.__call__

    def broken(self, model, inputs, items, step):
        loss, outputs = objective(self, model, inputs, items, step)
        return loss * (9 if step + 1 in steps else 1), outputs

    monkeypatch.setattr(run_trainer.TrainingLoss, "__call__", broken)


def test_checkpoints_before_divergence_are_kept(diverging_loss, tmp_path):
    recipe = toy_run(KNOCKING, tmp_path, 20, watch={"every": 2}, checkpoints={"every": 1, "keep": 2})
    with pytest.raises(RecipeError, match=r"step 12.*checkpoint-6"):
        train(recipe)
    assert [path.name for path in checkpoints(Path(recipe.output))] == ["checkpoint-7", "checkpoint-6"]
    assert len(losses(recipe)) == 12 and losses(recipe)[7] > 2 * losses(recipe)[6]


def test_checkpoint_skipped_at_high_loss_is_saved_later(monkeypatch, tmp_path):
    patch_high_loss(monkeypatch, [8, 9])
    train(toy_run(KNOCKING, tmp_path, 12, watch={"every": 1}, checkpoints={"every": 4, "keep": 9}))
    names = [path.name for path in checkpoints(Path(toy_run(KNOCKING, tmp_path, 12).output))]
    assert names == ["checkpoint-12", "checkpoint-10", "checkpoint-4"]


def test_stop_at_high_loss_saves_and_keeps_good_checkpoint(diverging_loss, tmp_path):
    sent = []

    def stop(stage, done, total, message=""):
        if stage == "training" and done == 9 and not sent:  # a second signal would end the process
            sent.append(os.kill(os.getpid(), signal.SIGTERM))

    recipe = toy_run(KNOCKING, tmp_path, 20, checkpoints={"every": 1, "keep": 1})
    assert run(recipe, stop).stopped_by == signal.SIGTERM
    names = [path.name for path in checkpoints(Path(recipe.output))]
    assert names[1:] == ["checkpoint-7"] and names[0] in ("checkpoint-9", "checkpoint-10")


def test_head_load_is_mean_over_micro_batches_of_step(tmp_path, monkeypatch):
    counted = []
    load = HeadRouting.load
    monkeypatch.setattr(HeadRouting, "load", lambda *arguments: counted.append(load(*arguments)) or counted[-1])
    recipe = toy_run(MIXTURE, tmp_path, 3, watch={"every": 2}, train={"micro_batch": 1})
    train(recipe)
    lines = [line for line in metrics(recipe) if "head_load/0/least" in line]
    assert [line["step"] for line in lines] == [2, 3]  # the last step has a checkpoint, and so a line
    assert len(counted) == 2 * recipe.batch_size > 2
    for number, line in enumerate(lines):
        step = counted[number * recipe.batch_size :][: recipe.batch_size]
        for layer in range(4):
            mean = torch.stack([micro[layer] for micro in step]).mean(0)
            assert line[f"head_load/{layer}/least"] == pytest.approx(mean.min().item())
            assert line[f"head_load/{layer}/most"] == pytest.approx(mean.max().item())
        assert any(micro[0].max() > line["head_load/0/most"] + 1e-6 for micro in step)
