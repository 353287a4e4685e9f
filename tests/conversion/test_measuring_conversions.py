"""The commands that measure conversions, at toy size: they run, and write their figures."""

import json

import pytest

from measuring import measured


@pytest.mark.slow
def test_a_small_model_is_trained_and_its_heads_are_measured(tmp_path):
    *_, said = measured("train_small.py", "qwen3", tmp_path / "small", "--steps", 2)
    assert said.startswith("2 steps of 1024 tokens, loss 8.")
    text, out = tmp_path / "small" / "evaluation.txt", tmp_path / "heads.json"
    common = (tmp_path / "small", text, "--windows", 1, "--length", 256, "--out", out, "--name")
    first, *lines = measured("component_heads.py", *common, "default", "pooled:2", "svd:2/2", "aligned:3,2:bfloat16")
    seen = ("--calibration", tmp_path / "small" / "calibration.txt", "--calibration-part", "0:0.1")
    measured("component_heads.py", *common, "seen", *seen, "auto:0.75")
    found = json.loads(out.read_text())
    assert found["default"]["source"] == json.loads(first)["loss"]
    assert all(
        got.pop("machine")["threads"] and got.pop("device") == "cpu" for got in found["default"]["cases"].values()
    )
    assert [{"case": case} | got for case, got in found["default"]["cases"].items()] == list(map(json.loads, lines))
    assert found["default"]["calibration"] is None and found["seen"]["calibration"] == "calibration.txt"
    assert len(found["seen"]["cases"]["auto:0.75"]["key"]) == 4


@pytest.mark.slow
def test_a_synthetic_checkpoint_is_converted(tmp_path):
    printed = measured("streaming.py", tmp_path / "out", "--gigabytes", 0.01, "--rounds", 1)
    found = json.loads("\n".join(printed))
    assert json.loads((tmp_path / "out" / "streaming.json").read_text()) == found
    assert found["bytes"] > 5e6
    assert all(found[name]["peak_bytes"] > 5e7 for name in ("neutral", "calibration", "virtual-heads"))
