"""The commands that measure training, at toy size: they run, write their figures, and go on."""

import json
from pydoc_data.topics import topics

import pytest

from crosshead.recipes.toy import write_tokenizer
from measuring import measured
from toy_checkpoints import write_stock


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(topics[name] for name in sorted(topics))[:60_000], encoding="utf-8")
    return path


@pytest.mark.slow
def test_all_mechanisms_from_scratch(tmp_path, text):
    command = ("from_scratch.py", tmp_path / "out", "--text", text, "--tokens", 4096, "--seeds", 2)
    *_, head, first = measured(*command)[:-7]
    assert head.startswith("held-out loss") and first.split()[:2] == ["baseline", "2"]
    found = json.loads((tmp_path / "out" / "from_scratch.json").read_text())
    assert len(found["losses"]) == 8 and found["losses"]["baseline"]["beside_baseline"] == 0
    for figures in found["losses"].values():
        assert 4 < min(figures["losses"].values()) <= figures["mean"] < 8.5 and figures["spread"] > 0
    lines = measured(*command)
    assert json.loads((tmp_path / "out" / "from_scratch.json").read_text()) == found
    assert len(lines) == 2 * 8 + 1 + 8


@pytest.mark.slow
def test_recovery(tmp_path, text):
    heads = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}
    write_stock(tmp_path / "stock", vocab_size=257, **heads)
    write_tokenizer(tmp_path / "stock")
    command = ("recovery.py", tmp_path / "stock", text, tmp_path / "out", "--tokens", 8192)
    measured(*command, "--only", "mixture", "--set", "train.learning_rate=1e-3")
    measured(*command, "--only", "explicit", "--set", "train.learning_rate=1e-3")
    found = json.loads((tmp_path / "out" / "recovery.json").read_text())
    assert sorted(found) == ["explicit", "mixture"]
    for figures in found.values():
        assert figures["curve"][0] == [0, figures["before"]] and figures["curve"][-1] == [8192, figures["after"]]
        assert figures["after"] < figures["before"] and len(figures["curve"]) > 5
        assert figures["learning_rate"] == 1e-3 and figures["tokens_a_step"] == 512
    assert found["explicit"]["match_steps"] == 3 and found["explicit"]["source"] == found["mixture"]["source"]
