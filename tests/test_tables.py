"""Measured results are rendered as tables, and the tables in the documents are up to date."""

import importlib

import pytest

from rules import ROOT


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "measure"))
    return importlib.import_module("tables")


def test_tables_in_documents_are_up_to_date(tables):
    for document in tables.documents()[:-1]:
        text = document.read_text(encoding="utf-8")
        assert tables.BLOCK.search(text), document
        assert text == tables.renewed(text), f"{document}: make tables"


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 4])
def test_memory_table_is_up_to_date(tables, index):
    """Checks two rows only, since each takes seconds."""
    (table,) = tables.BLOCK.finditer(tables.AT_SCALE.read_text(encoding="utf-8"))
    assert tables.memory_row(*tables.PLANS[index]) == table[0].splitlines()[3 + index], "make tables"


def test_accuracy_table(tables):
    piqa, blimp = ({"score": score, "items": items} for score, items in ((0.7, 600), (0.75, 3000)))
    changes = {"change": -0.02, "interval": [-0.03, -0.01]}, {"change": 0.01, "interval": [-0.005, 0.025]}
    trained = {"piqa_items": piqa | changes[0], "blimp_items": blimp | changes[1]}
    models = {"source": {"piqa_items": piqa, "blimp_items": blimp}, "mixture": trained, "mixture-trained": trained}
    assert tables.accuracy_table({"models": models}).splitlines() == [
        "| SmolLM2-135M | PIQA (600 items) | BLiMP (3,000 pairs) |",
        "| --- | ---: | ---: |",
        "| source | 70.0% | 75.0% |",
        "| `mixture`, 7 of 9 heads active | -2.0 (-3.0 to -1.0) | +1.0 (-0.5 to +2.5) |",
        "| `mixture`, 7 of 9 heads active, trained | -2.0 (-3.0 to -1.0) | +1.0 (-0.5 to +2.5) |",
    ]


def test_knocking_learning_rate_table(tables):
    plain = {"losses": {"0": 3.0, "1": 3.2}, "beside_plain": 0.0, "spread_beside": 0.0, "drift": 0.0}
    faster = plain | {"beside_plain": -0.1, "spread_beside": 0.02, "drift": 0.03}
    text = tables.knocking_table({"cases": {"plain": plain, "3 x": faster}, "tokens": 2000})
    assert "\n| no mechanism | 3.1000 |  |  |\n| 3 times the model's | 3.1000 | -0.1000 ± 0.0200 | 0.0300 |\n" in text
    assert text.endswith("\n\n2,000 tokens; 2 seeds.\n")


@pytest.mark.parametrize(("spread", "difference"), [(0.01, "-0.0500 ± 0.0100"), (None, "-0.0500")])
def test_training_from_scratch_table(tables, spread, difference):
    losses = {"losses": {"0": 3.0, "1": 3.2}, "mean": 3.1, "beside_baseline": -0.05, "spread_beside": spread}
    cases = {"baseline": losses | {"mixers": {}}, "knocking": losses | {"mixers": {"knocking": {}}}}
    text = tables.scratch_table({"losses": cases, "shape": {"num_hidden_layers": 4}, "tokens": 1000})
    assert f"\n| baseline | 3.1000 |  |\n| knocking | 3.1000 | {difference} |\n" in text
    assert text.endswith("\n\n4 layers; 1,000 tokens; 2 seeds.\n")


def test_training_speed_table(tables):
    speeds = {"median_ratio": 0.95, "ratios": [0.9, 0.95, 1.0], "mixers": {"knocking": {"on": ["query", "value"]}}}
    report = {
        "tokens_per_second": {"knocking-mlp": speeds},
        "settings": {"rounds": 3, "steps": 7},
        "machine": {"accelerator": None, "processor": "a CPU", "threads": 2, "torch": "2.13", "transformers": "5.23"},
        "device": "cpu",
    }
    text = importlib.import_module("speed_tables").train_table(report)
    assert "\n| `knocking-mlp` | on: query+value | 0.950 (0.900 to 1.000) |\n" in text
    assert text.endswith("\n\na CPU, 2 threads, torch 2.13, transformers 5.23; 3 rounds of 7 steps.\n")


def test_conversions_table(tables):
    heads = {"SmolLM2-135M, 9 heads": {"cases": {"mixture:7": {"above_source": 0.1}}}}
    heads["SmolLM2-135M, 9 heads, calibrated on the same kind of text"] = heads["SmolLM2-135M, 9 heads"]
    lines = tables.conversions_table(heads, {"mixture-5": {"above_control": -0.02}}).splitlines()
    assert len(lines) == 2 + 8
    assert "| `mixture`, 7 of 9 heads active | +0.100 | +0.100 |  |" in lines
    assert "| `mixture`, 5 of 9 heads active |  |  | -0.020 |" in lines


def test_recovery_table_of_several_models(tables):
    trained = {"source": 3.0, "before": 3.2, "after": 2.95, "tokens": 200_000, "heads": 8, "kv_heads": 4}
    near = trained | {"above_control": 0.02, "control": 2.93, "tokens_until_near": 1000}
    far = near | {"above_control": 0.06, "tokens_until_near": None}
    reports = {"a model": {"mixture-5": near, "mixture-5-direct": trained}, "another": {"explicit": far}}
    assert tables.recovery_table(reports).splitlines()[2:] == [
        "| a model | `mixture`, 4 of 8 heads active | 0.200 | 0.020 | 1,000 tokens |  |  |",
        "| another | `explicit`, 3 of 4 component heads | 0.200 | 0.060 | never |  |  |",
    ]


def test_demo_table_has_a_row_per_model(tables):
    report = {
        "name": "knocking",
        "is": "one map",
        "scores": {"prose": 30.0, "grammar": 0.75},
        "kv_bytes_per_token": 384,
    }
    assert "\n| knocking: one map | 30.00 | 75% | 384 |\n" in tables.demo_table({"models": [report]})


def test_heads_and_streaming_tables(tables):
    machine = {"accelerator": "a GPU", "threads": 2}
    cases = {"aligned:2": {"above_source": 0.1, "seconds": 3.2}}
    by_device = {
        name: {"source": 3.0, "cases": cases, "machine": machine} | device
        for name, device in (("on a CPU", {}), ("on a GPU", {"device": "cuda"}))
    }
    text = tables.heads_table(by_device)
    assert "| on a CPU | `explicit`, 2 component heads | +0.1000 (3.0000) | 3 s, 2 CPU threads |" in text
    assert "| on a GPU | `explicit`, 2 component heads | +0.1000 (3.0000) | 3 s, a GPU |" in text
    cases = {"auto:0.75:bfloat16": {"above_source": 0.05, "seconds": 3.2}}
    text = tables.heads_table({"a model": {"source": 3.0, "cases": cases, "machine": machine}})
    assert "| a model | `explicit`, `--cache 75%`, in bfloat16 | +0.0500 (3.0000) |" in text
    run = {"seconds": 12.0, "peak_bytes": 1.9e9}
    neutral = {"median_ours": 9.0, "median_ratio": 1.12, "peak_bytes": 7.6e8}
    text = tables.streaming_table({"bytes": 8e9, "neutral": neutral, "calibration": run, "virtual-heads": run})
    assert "| a checkpoint of 8.00 GB |" in text and "| 1.12 times, in 9 s | 0.76 GB |" in text
    assert text.count("| | 1.90 GB |") == 2


def test_missing_result_is_shown_as_not_measured(tables):
    missing = tables.written_by(tables.RESULTS / "none.json", "make none", tables.heads_table)
    assert missing() == "`make none`: not measured yet.\n"
