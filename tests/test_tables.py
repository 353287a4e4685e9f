"""Results become the tables of the documents, and the tables are as they would be written."""

import importlib
import json

import pytest

from rules import ROOT


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "measure"))
    return importlib.import_module("tables")


def test_generated_tables_are_as_they_would_be_written(tables):
    for document in tables.documents()[:-1]:
        text = document.read_text(encoding="utf-8")
        assert tables.BLOCK.search(text), document
        assert text == tables.renewed(text), f"{document}: make tables"


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 4])
def test_the_table_of_memory_is_as_it_would_be_written(tables, index):
    """Two rows of it: each takes seconds."""
    (table,) = tables.BLOCK.finditer(tables.AT_SCALE.read_text(encoding="utf-8"))
    assert tables.memory_row(*tables.PLANS[index]) == table[0].splitlines()[3 + index], "make tables"


def test_a_result_that_is_not_there_is_said_to_be_missing(tables, tmp_path):
    lines = tables.results_table(tmp_path).splitlines()
    assert len(lines) == 2 + len(tables.SOURCES)
    assert all(f"| {tables.NOT_MEASURED} |" in line for line in lines[2:])


def test_results_become_lines(tables, tmp_path):
    speeds = {"median_ratio": 0.95, "ratios": [0.9, 0.95, 1.0]}
    losses = {"losses": {"0": 3.0, "1": 3.2}, "mean": 3.1, "beside_baseline": -0.05, "spread_beside": 0.01}
    reports = {
        "benchmark_items.json": {
            "models": {
                "source": {"piqa_items": {"score": 0.7, "standard_error": 0.01, "items": 600}},
                "mixture-trained": {
                    "blimp_items": {
                        "score": 0.8,
                        "standard_error": 0.005,
                        "items": 3000,
                        "change": -0.02,
                        "interval": [-0.03, -0.01],
                    }
                },
            }
        },
        "knocking_rates.json": {
            "cases": {
                "plain": {"losses": {"0": 3.0}, "beside_plain": 0.0, "spread_beside": None, "drift": 0.0},
                "3 x": {"losses": {"0": 2.9}, "beside_plain": -0.1, "spread_beside": None, "drift": 0.02},
            },
            "tokens": 2000,
        },
        "from_scratch.json": {
            "losses": {"knocking": losses},
            "shape": {"num_hidden_layers": 4},
            "tokens": 1000,
        },
        "train.json": {
            "tokens_per_second": {"knocking-mlp": speeds | {"mixers": {"knocking": {"on": ["query", "value"]}}}},
            "settings": {"rounds": 3, "steps": 7},
            "machine": {"accelerator": None, "processor": "a processor", "threads": 2},
        },
    }
    assert reports.keys() == tables.SOURCES.keys()
    for name, report in reports.items():
        (tmp_path / name).write_text(json.dumps(report))
    text = tables.results_table(tmp_path)
    for words in (
        "source: accuracy | PIQA 70.0% of 600 items |",
        "7 of 9 active heads: accuracy | trained: BLiMP 80.0% (-2.0 points, 95% interval -3.0 to -1.0) |",
        "2,000 tokens, 1 seeds: held-out loss compared with the plain model, by learning rate | 3 x -0.1000 "
        "(drift 0.0200) |",
        "4 layers, 1,000 tokens, 2 seeds): held-out loss, and the difference from the baseline | knocking 3.1000 "
        "(-0.0500, standard deviation 0.0100) | `make measure-from-scratch ARGS='--tokens 1000 --seeds 2'` |",
        "tokens a second, relative to Trainer with the stock model (a processor, 2 threads, 3 rounds of 7 steps) | "
        "knocking-mlp (on: query+value) 0.950 (0.900 to 1.000) | `crosshead bench train` |",
    ):
        assert words in text
    assert tables.NOT_MEASURED not in text


def test_conversions_become_one_table(tables):
    heads = {"SmolLM2-135M, 9 heads": {"cases": {"mixture:7": {"above_source": 0.1}}}}
    heads["SmolLM2-135M, 9 heads, calibrated on the same kind of text"] = heads["SmolLM2-135M, 9 heads"]
    lines = tables.conversions_table(heads, {"mixture-5": {"above_control": -0.02}}).splitlines()
    assert len(lines) == 2 + 8
    assert "| `mixture`, 7 of 9 heads active | +0.100 | +0.100 |  |" in lines
    assert "| `mixture`, 5 of 9 heads active |  |  | -0.020 |" in lines


def test_the_recovery_of_several_models_becomes_one_table(tables):
    trained = {"source": 3.0, "before": 3.2, "after": 2.95, "tokens": 200_000, "heads": 8, "kv_heads": 4}
    near = trained | {"above_control": 0.02, "control": 2.93, "tokens_until_near": 1000}
    far = near | {"above_control": 0.06, "tokens_until_near": None}
    reports = {"a model": {"mixture-5": near, "mixture-5-direct": trained}, "another": {"explicit": far}}
    assert tables.recovery_table(reports).splitlines()[2:] == [
        "| a model | 4 of 8 active heads | 0.200 | 0.020 | 1,000 tokens |  |  |",
        "| another | 3 of 4 component heads | 0.200 | 0.060 | never |  |  |",
    ]


def test_the_table_of_the_demo_has_a_line_for_each_model(tables):
    report = {
        "name": "knocking",
        "is": "one map",
        "scores": {"prose": 30.0, "grammar": 0.75},
        "kv_bytes_per_token": 384,
    }
    assert "\n| knocking: one map | 30.00 | 75% | 384 |\n" in tables.demo_table({"models": [report]})


def test_results_of_conversions_become_lines(tables):
    machine = {"accelerator": "a GPU", "threads": 2}
    cases = {"aligned:2": {"above_source": 0.1, "seconds": 3.2}}
    by_device = {
        name: {"source": 3.0, "cases": cases, "machine": machine} | device
        for name, device in (("on a CPU", {}), ("on a GPU", {"device": "cuda"}))
    }
    text = tables.heads_table(by_device)
    assert "| on a CPU | 2 components, `method=aligned` | +0.1000 (3.0000) | 3 s, 2 CPU threads |" in text
    assert "| on a GPU | 2 components, `method=aligned` | +0.1000 (3.0000) | 3 s, a GPU |" in text
    cases = {"auto:0.75:bfloat16": {"above_source": 0.05, "seconds": 3.2}}
    text = tables.heads_table({"a model": {"source": 3.0, "cases": cases, "machine": machine}})
    assert "| a model | chosen for 75% of the cache, in bfloat16 | +0.0500 (3.0000) |" in text
    found = {"seconds": 12.0, "peak_bytes": 1.9e9}
    neutral = {"median_ours": 9.0, "median_ratio": 1.12, "peak_bytes": 7.6e8}
    text = tables.streaming_table({"bytes": 8e9, "neutral": neutral, "calibration": found, "virtual-heads": found})
    assert "| a checkpoint of 8.00 GB |" in text and "| 1.12 times, in 9 s | 0.76 GB |" in text
    assert text.count("| | 1.90 GB |") == 2
    assert tables.NOT_MEASURED in tables.written_by(tables.RESULTS / "none.json", "make none", tables.heads_table)()


def test_results_that_do_not_say_how_they_were_made_become_lines(tables, tmp_path):
    speeds = {"median_ratio": 0.95, "ratios": [0.9, 0.95, 1.0]}
    machine = {"accelerator": None, "processor": "a processor", "threads": 2}
    report = {"tokens_per_second": {"explicit": speeds}, "machine": machine}
    (tmp_path / "train.json").write_text(json.dumps(report))
    (line,) = [line for line in tables.results_table(tmp_path).splitlines() if "explicit" in line]
    assert "(a processor, 2 threads)" in line and line.endswith(
        "| explicit 0.950 (0.900 to 1.000) | `crosshead bench train` |"
    )
