"""The scripts that measure conversions run at toy size and write their figures."""

import json

import pytest

from measuring import measured


@pytest.mark.slow
def test_train_small_and_component_heads_scripts_write_figures(tmp_path):
    *_, summary = measured("train_small.py", "qwen3", tmp_path / "small", "--steps", 2)
    assert summary.startswith("2 steps of 1024 tokens, loss 8.")
    text, out = tmp_path / "small" / "evaluation.txt", tmp_path / "heads.json"
    common = (tmp_path / "small", text, "--windows", 1, "--length", 256, "--out", out, "--name")
    first, *lines = measured("component_heads.py", *common, "default", "pooled:2", "svd:2/2", "aligned:3,2:bfloat16")
    calibration = ("--calibration", tmp_path / "small" / "calibration.txt", "--calibration-part", "0:0.1")
    measured("component_heads.py", *common, "seen", *calibration, "auto:0.75")
    report = json.loads(out.read_text())
    assert report["default"]["source"] == json.loads(first)["loss"]
    assert all(
        figures.pop("machine")["threads"] and figures.pop("device") == "cpu"
        for figures in report["default"]["cases"].values()
    )
    assert [{"case": case} | figures for case, figures in report["default"]["cases"].items()] == list(
        map(json.loads, lines)
    )
    assert report["default"]["calibration"] is None and report["seen"]["calibration"] == "calibration.txt"
    assert len(report["seen"]["cases"]["auto:0.75"]["key"]) == 4


@pytest.mark.slow
def test_streaming_script_writes_figures(tmp_path):
    printed = measured("streaming.py", tmp_path / "out", "--gigabytes", 0.01, "--rounds", 1)
    report = json.loads("\n".join(printed))
    assert json.loads((tmp_path / "out" / "streaming.json").read_text()) == report
    assert report["bytes"] > 5e6
    assert all(report[name]["peak_bytes"] > 5e7 for name in ("neutral", "calibration", "virtual-heads"))
