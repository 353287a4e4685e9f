"""A dry run prints the plan that the conversion then carries out, and writes nothing."""

import json

import pytest

import crosshead
from broken import run, snapshot
from crosshead.common.errors import ConversionError
from toy_checkpoints import write_stock

CASES = {
    "neutral": {"knocking": {"form": "linear"}},
    "fewer heads": {"explicit": {"key_heads": 1, "value_heads": 1}},
    "two": {"talking": {}, "mixture": {"active_heads": 3, "shared": "calibrated"}},
}


@pytest.mark.parametrize("name", CASES)
def test_plan_matches_conversion_report_and_writes_nothing(name, tmp_path):
    write_stock(tmp_path / "source", "Qwen2")
    before = snapshot(tmp_path)
    plan = crosshead.convert(tmp_path / "source", tmp_path / "out", CASES[name], plan_only=True)
    assert snapshot(tmp_path) == before
    report = crosshead.convert(tmp_path / "source", tmp_path / "out", CASES[name])
    for key in ("source", "counts", "dropped"):
        assert plan[key] == report[key] or (key == "source" and plan[key].items() <= report[key].items())
    assert {name: step["fate"] for name, step in plan["tensors"].items()} == {
        name: step["fate"] for name, step in report["tensors"].items()
    }
    for key in ("kv_bytes_per_token_before", "kv_bytes_per_token_after"):
        assert plan[key] == report["verification"][key]


def test_plan_includes_automatically_chosen_layers(tmp_path):
    write_stock(tmp_path / "source")
    plan = crosshead.convert(
        tmp_path / "source", tmp_path / "out", {"explicit": {}}, layers="auto", budget=0.75, plan_only=True
    )
    assert plan["kv_bytes_per_token_after"] <= 0.75 * plan["kv_bytes_per_token_before"]
    assert plan["chosen"]["losses"] and not (tmp_path / "out").exists()


def test_dry_run_of_fold_and_convert_commands_writes_nothing(tmp_path, capfd, monkeypatch):
    write_stock(tmp_path / "source")
    crosshead.convert(tmp_path / "source", tmp_path / "model", {"knocking": {"form": "linear"}})
    monkeypatch.chdir(tmp_path)
    before = snapshot(tmp_path)
    status, out, _ = run(capfd, monkeypatch, "fold model stock --dry-run --json")
    assert status == 0 and json.loads(out)["counts"]["dropped"] > 0
    status, out, _ = run(capfd, monkeypatch, "convert source out --mixer knocking:form=linear --dry-run")
    assert status == 0 and "created model.layers.0.self_attn.mixers.knocking" in out and "KV cache" in out
    assert snapshot(tmp_path) == before


def test_dry_run_refuses_target_that_is_not_a_model_folder(tmp_path):
    write_stock(tmp_path / "source")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").write_text("mine")
    with pytest.raises(ConversionError, match="not a model directory"):
        crosshead.convert(tmp_path / "source", tmp_path / "out", {"knocking": {}}, plan_only=True)
