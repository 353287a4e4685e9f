"""The scripts that measure training run at toy size, write their figures, and resume."""

import importlib
import json
import sys
from copy import deepcopy
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch

from crosshead.recipes.schema.recipe import load_recipe
from crosshead.recipes.schema.toy import write_tokenizer
from measure import processes, recovery, resume
from measuring import measured
from toy_checkpoints import write_stock


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(topics[name] for name in sorted(topics))[:60_000], encoding="utf-8")
    return path


@pytest.mark.slow
def test_from_scratch_script_measures_and_resumes(tmp_path, text_file):
    command = ("from_scratch.py", tmp_path / "out", "--text", text_file, "--tokens", 4096, "--seeds", 2)
    *_, head, first = measured(*command)[:-7]
    assert head.startswith("held-out loss") and first.split()[:2] == ["baseline", "2"]
    report = json.loads((tmp_path / "out" / "from_scratch.json").read_text())
    assert len(report["losses"]) == 8 and report["losses"]["baseline"]["beside_baseline"] == 0
    for figures in report["losses"].values():
        assert 4 < min(figures["losses"].values()) <= figures["mean"] < 8.5 and figures["spread"] > 0
    lines = measured(*command)
    assert json.loads((tmp_path / "out" / "from_scratch.json").read_text()) == report
    assert len(lines) == 2 * 8 + 1 + 8


@pytest.mark.slow
def test_diffusion_script_compares_with_stock_model(tmp_path):
    pytest.importorskip("diffusers")
    lines = measured("diffusion.py", tmp_path / "diffusion.json", "--steps", 3, "--seeds", 2)
    assert len(lines) == 2 * 3 + 1 + 3
    results = json.loads((tmp_path / "diffusion.json").read_text())["losses"]
    assert results["baseline"]["beside_baseline"] == 0
    for figures in results.values():
        assert 0 < min(figures["losses"].values()) < 2 and figures["spread"] > 0


@pytest.mark.slow
def test_other_objectives_script_measures_and_resumes(tmp_path):
    report = tmp_path / "objectives.json"
    lines = measured("other_objectives.py", report, "--steps", 2, "--seeds", 2)
    assert len(lines) == 3 * (2 * 8 + 2 + 8)
    complete = json.loads(report.read_text())
    for case in complete.values():
        assert len(case["losses"]) == 8 and case["losses"]["baseline"]["beside_baseline"] == 0
        assert all(1 < figures["mean"] < 9 and figures["spread"] > 0 for figures in case["losses"].values())
    stopped = json.loads(report.read_text())
    del stopped["digits, ViT"]["scores"]["talking"]["1"]
    report.write_text(json.dumps(stopped))
    assert len(measured("other_objectives.py", report, "--steps", 2, "--seeds", 2)) == 1 + 3 * (2 + 8)
    assert json.loads(report.read_text()) == complete


def test_other_objectives_corrupts_spans_and_masks_tokens(monkeypatch):
    """Inputs and labels together hold each token once; a sentinel stands for each span."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "measure")  # the scripts import each other
    other_objectives = importlib.import_module("other_objectives")
    draws = torch.Generator().manual_seed(0)
    tokens = torch.arange(128).view(2, 64)
    result = other_objectives.corrupted(tokens, 1000, draws)
    assert result["input_ids"].shape == (2, 64 - 10 + 3) and result["labels"].shape == (2, 10 + 3 + 1)
    for row, inputs, labels in zip(tokens, result["input_ids"], result["labels"], strict=True):
        assert sorted([*inputs[inputs < 1000], *labels[labels < 1000]]) == row.tolist()
        assert inputs[inputs >= 1000].tolist() == [1000, 1001, 1002]
        assert labels[labels >= 1000].tolist() == [1000, 1001, 1002, 1003]
    masked = other_objectives.masked(tokens.repeat(50, 1), 1000, draws)
    selected = masked["labels"] != -100
    assert 0.13 < selected.double().mean() < 0.17
    assert 0.75 < (masked["input_ids"][selected] == 1000).double().mean() < 0.85


@pytest.mark.parametrize("name", recovery.NAMES)
def test_recovery_recipe_batch_size_and_learning_rate(name, tmp_path):
    shipped = load_recipe(f"small/smollm2_{name.partition('-')[0]}").train
    train = recovery.recipe(tmp_path, name, 200_000, []).train
    assert (train.batch_tokens, train.learning_rate) == (1536, recovery.LEARNING_RATE)
    assert recovery.recipe(tmp_path, name, 200_000, ["train.learning_rate=1e-3"]).train.learning_rate == 1e-3
    assert recovery.recipe(tmp_path, name, 10**8, []).train.batch_tokens == shipped.batch_tokens


@pytest.mark.parametrize("name", recovery.CONVERSIONS)
def test_recovery_control_trains_source_on_same_data_without_teacher(name, tmp_path):
    names = (name, f"{name.partition('-')[0]}{recovery.CONTROL}", f"{name}{recovery.DIRECT}")
    case, control, direct = (recovery.recipe(tmp_path, each, 200_000, []) for each in names)
    assert case.train == control.train == direct.train and case.data == control.data == direct.data
    assert control.model.path == str(tmp_path / "source") and case.model.path == direct.model.path
    assert control.distillation is None and len({each.output for each in (case, control, direct)}) == 3
    assert direct.attention_loss_steps == 0 and direct.distillation.weight == case.distillation.weight


def test_recovery_conversions_round_numbers_of_heads():
    conversions = {name: recovery.conversion(name, 9, 3) for name in recovery.CONVERSIONS}
    assert conversions["explicit"] == ({"explicit": {"key_heads": "2", "value_heads": "2"}}, {})
    assert conversions["explicit-half"] == ({"explicit": {}}, {"layers": "auto", "budget": 0.5})
    assert conversions["mixture"] == ({"mixture": {"active_heads": "7"}}, {})
    assert conversions["mixture-5"] == ({"mixture": {"active_heads": "5"}}, {})
    assert recovery.conversion("explicit", 8, 4)[0]["explicit"]["value_heads"] == "3"
    assert recovery.conversion("mixture-5", 8, 4)[0] == {"mixture": {"active_heads": "4"}}


def test_recovery_compares_with_control_only_for_same_settings():
    same = dict.fromkeys(recovery.SAME, 1)
    case, control = [(0, 3.24), (10, 3.1), (20, 2.98)], [(0, 3.2), (10, 3.04), (20, 2.95)]
    report = {"explicit-half": same | {"after": 2.98, "curve": case}}
    report["explicit-control"] = same | {"after": 2.95, "curve": control}
    compared = recovery.beside_controls(report)["explicit-half"]
    assert compared["above_control"] == pytest.approx(0.03) and compared["tokens_until_near"] == 20
    other = {name: figures | {"tokens": number} for number, (name, figures) in enumerate(report.items())}
    del other["explicit-half"]["above_control"]
    assert "above_control" not in recovery.beside_controls(other)["explicit-half"]


@pytest.mark.slow
def test_recovery_and_benchmark_scripts_report_figures(tmp_path, text_file):
    heads = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}
    write_stock(tmp_path / "stock", vocab_size=257, max_position_embeddings=512, **heads)
    write_tokenizer(tmp_path / "stock")
    command = ("recovery.py", tmp_path / "stock", text_file, tmp_path / "out", "--tokens", 8192)
    names = ["explicit-control", "explicit", "explicit-half-direct", "mixture"]
    for name in names:
        measured(*command, "--only", name, "--set", "train.learning_rate=1e-3")
    report = json.loads((tmp_path / "out" / "recovery.json").read_text())
    assert [*report] == names
    for figures in report.values():
        assert figures["curve"][0] == [0, figures["before"]] and figures["curve"][-1] == [8192, figures["after"]]
        assert figures["after"] < figures["before"] and len(figures["curve"]) > 10
        assert figures["learning_rate"] == 1e-3 and figures["tokens_a_step"] == 512
        assert figures["heads"] == 9 and figures["kv_heads"] == 3
    explicit, control = report["explicit"], report["explicit-control"]
    assert explicit["source"] == report["mixture"]["source"] == control["before"]
    assert explicit["above_control"] == pytest.approx(explicit["after"] - control["after"])
    assert "above_control" not in report["mixture"] and report["explicit-half-direct"]["match_steps"] == 0
    scores = benchmark_scores(tmp_path)
    assert [*scores] == ["source", "explicit", "explicit-trained", "explicit-half", "mixture", "mixture-trained"]
    for name, tasks in scores.items():
        assert [*tasks] == ["piqa_items", "blimp_items"] and [each["items"] for each in tasks.values()] == [4, 8]
        for each in tasks.values():
            assert 0 <= each["score"] <= 1 and ("change" in each) == (name != "source")


def benchmark_scores(folder):
    """Return the scores of the models of a recovery on a few short benchmark items."""
    items = [{"goal": "a b", "sol1": f"c{number}", "sol2": f"d {number}", "label": number % 2} for number in range(4)]
    pairs = [
        {"sentence_good": f"the {number} cats sit", "sentence_bad": f"the {number} cat sit"} for number in range(4)
    ]
    for path, rows in (("piqa/dev", items), ("blimp/one", pairs), ("blimp/two", pairs)):
        (folder / "data" / path).parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "data" / f"{path}.jsonl").write_text(text, encoding="utf-8")
    measured("benchmark_items.py", folder / "data", folder / "out", "--out", folder / "scores.json")
    return json.loads((folder / "scores.json").read_text())["models"]


@pytest.mark.slow
def test_knocking_rates_script_reports_drift_by_rate(tmp_path, text_file):
    heads = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}
    write_stock(tmp_path / "stock", vocab_size=257, max_position_embeddings=512, **heads)
    write_tokenizer(tmp_path / "stock")
    measured("knocking_rates.py", tmp_path / "stock", text_file, tmp_path / "out", "--tokens", 8192, "--seeds", 2)
    cases = json.loads((tmp_path / "out" / "knocking_rates.json").read_text())["cases"]
    assert [*cases] == ["plain", "1 x", "3 x", "10 x"] and cases["plain"]["beside_plain"] == 0
    drifts = [figures["drift"] for figures in cases.values()]
    assert drifts[0] == 0 and drifts == sorted(drifts) and all(len(each["losses"]) == 2 for each in cases.values())


@pytest.mark.slow
@pytest.mark.distributed
def test_endings_script_counts_clean_exits_of_two_processes(tmp_path):
    lines = measured("endings.py", tmp_path, "--ends", 2, "--load", 1)
    assert json.loads("\n".join(lines)) == {"ends": 2, "load": 1, "exit_statuses": {"0": 4}, "threads_left": {}}


SAME = {
    "losses_different": 0,
    "batches_different": 0,
    "steps_with_several_losses": 0,
    "weights_equal": True,
    "kills": 10,
}
RESUMED = {
    "killed": [SAME | {"processes": 1}, SAME | {"processes": 2}],
    "two_processes_then_one": {
        "exit_statuses": [143, 143],
        "greatest_difference_of_losses": 2e-7,
        "batches_different": 0,
    },
}


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        ((), {}, []),
        (("killed", 0), {"losses_different": 1}, ["losses_different", "1"]),
        (("killed", 1), {"batches_different": 1}, ["batches_different", "2"]),
        (("killed", 1), {"weights_equal": False}, ["weights", "2"]),
        (("killed", 0), {"kills": 9}, ["kills", "1"]),
        (("two_processes_then_one",), {"batches_different": 3}, ["batches"]),
        (("two_processes_then_one",), {"greatest_difference_of_losses": 1e-4}, ["losses"]),
        (("two_processes_then_one",), {"exit_statuses": [143, 1]}, ["exit statuses"]),
    ],
)
def test_resume_script_fails_on_differences(keys, value, words, tmp_path, monkeypatch, capsys):
    report = deepcopy(RESUMED)
    part = report
    for key in keys:
        part = part[key]
    part |= value
    monkeypatch.setattr(sys, "argv", ["resume.py", str(tmp_path)])
    monkeypatch.setattr(resume, "two_epochs", lambda *_: None)
    monkeypatch.setattr(resume, "killed", lambda recipe, folder, kills, count, seed: report["killed"][count - 1])
    monkeypatch.setattr(resume, "changed", lambda *_: report["two_processes_then_one"])
    assert_exit(resume.main, words)
    assert json.loads(capsys.readouterr().out) == report


@pytest.mark.parametrize(
    ("kind", "difference", "words"),
    [
        ("greatest_difference_of_losses", 9e-6, []),
        ("greatest_difference_of_losses", 2e-5, ["mixture, 2 x 4"]),
        ("greatest_difference_of_held_out_losses", float("nan"), ["mixture, 2 x 4"]),
    ],
)
def test_processes_script_fails_on_differing_losses(kind, difference, words, tmp_path, monkeypatch, capsys):
    nothing = {"greatest_difference_of_losses": {}, "greatest_difference_of_held_out_losses": {}}
    report = nothing | {kind: {"2 x 4": difference, "1 x 2 x 4": 0.0}}
    monkeypatch.setattr(sys, "argv", ["processes.py", str(tmp_path)])
    monkeypatch.setattr(processes, "recipes", lambda *_: {"mixture": None})
    monkeypatch.setattr(processes, "compared", lambda *_: report)
    assert_exit(processes.main, words)
    assert "mixture" in json.loads(capsys.readouterr().out)


def assert_exit(main, words):
    """Run `main`: it must exit with these words, or succeed if there are none."""
    if not words:
        main()
        return
    with pytest.raises(SystemExit) as ended:
        main()
    assert all(word in ended.value.code for word in words)
