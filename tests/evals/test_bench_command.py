"""`crosshead bench attention` and `decode`: the report, the table, and wrong uses."""

import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch

from broken import run
from crosshead.conversion.bench_convert import MIXERS
from crosshead.evals.bench import cases as bench_cases
from crosshead.evals.bench import machine as kept_memory
from crosshead.evals.bench import models as bench_models
from crosshead.evals.bench import pairs as bench_pairs
from crosshead.evals.bench import run as bench_run
from crosshead.evals.bench.case import DTYPES, RESULT, TIME, Case
from crosshead.evals.bench.cases import ATTENTION, COMPILED, DECODE
from crosshead.evals.bench.run import amount, bench, bench_lines
from rules import ROOT
from tiers import first

VERSIONS = {"torch": "1", "transformers": "2"}
KNOWN = {
    "attention": {case.name for case in ATTENTION},
    "decode": {case.name for case in DECODE},
    "compiled": {case.name for case in COMPILED},
    "convert": {*MIXERS},
}


def scripted_case(name, ours, baseline, **fields):
    """Return a case whose two sides return the given readings, one per run."""
    readings = {True: iter(ours), False: iter(baseline)}

    def make(side, **shape):
        return lambda: next(readings[side])

    return Case(name, f"{name} in words", "a baseline", make, {"tokens": 3}, measured=RESULT, **fields)


@pytest.fixture(autouse=True)
def _unchanged_malloc_settings(monkeypatch):
    """Leave the malloc settings alone: other tests in this process measure memory."""
    monkeypatch.setattr(kept_memory, "MALLOC_SETTINGS", {})


@pytest.fixture
def three_cases():
    return [
        scripted_case("quick", [1, 2, 3], [4, 4, 4], targets={"cpu": 0.5}),
        scripted_case("slow", [5, 2, 6], [2, 4, 4], targets={"cpu": 1.25}, work=8_000_000_000, dtype="bfloat16"),
        scripted_case("even", [9, 11, 12], [10, 10, 10], targets={"cpu": 1.0}, within_noise=True, unit="bytes"),
    ]


def test_report_and_summary_contain_all_figures(three_cases):
    events = []
    report = bench(three_cases, 3, "cpu", lambda *event: events.append(event))
    assert report["device"] == "cpu" and report["machine"]["torch"] == version("torch") and "took_seconds" in report
    quick, slow, even = report["cases"].values()
    assert quick == {
        "what": "quick in words",
        "compared_with": "a baseline",
        "shape": {"tokens": 3},
        "dtype": "float32",
        "unit": "seconds",
        "rounds": 3,
        "ours": [1, 2, 3],
        "baseline": [4, 4, 4],
        "median_ours": 2,
        "median_baseline": 4,
        "ratios": [0.25, 0.5, 0.75],
        "median_ratio": 0.5,
        "quartile_ratios": [0.375, 0.625],
        "least_ratio": 0.25,
        "greatest_ratio": 0.75,
        "target": 0.5,
        "within_noise": False,
        "met": True,
    }
    assert (slow["median_ratio"], slow["met"], slow["dtype"]) == (1.5, False, "bfloat16")
    assert slow["bytes_per_second"] == [1.6e9, 2e9]
    assert (even["median_ratio"], even["quartile_ratios"][0], even["met"]) == (1.1, 1.0, True)
    assert events[0] == ("measuring", 0, 9, "quick") and events[-1] == ("measuring", 9, 9, "even")
    head, *rows = bench_lines(report)
    assert head.split()[0] == "cpu"
    assert [[row.split()[0], re.findall(r"[\d.]+", row), "missed" in row] for row in rows] == [
        ["quick", ["2", "4", "0.500", "0.375", "0.625", "0.5"], False],
        ["slow", ["5", "4", "1.500", "1.000", "2.000", "1.25"], True],
        ["even", ["11", "10", "1.100", "1.000", "1.150", "1"], False],
    ]


def test_case_without_target_is_neither_met_nor_missed(three_cases):
    report = bench([replace(three_cases[0], targets={"cuda": 0.1})], 3)
    assert report["cases"]["quick"]["met"] is None
    (row,) = (line for line in bench_lines(report) if "quick" in line)
    assert "met" not in row and "missed" not in row


@pytest.mark.parametrize("measured", [TIME, RESULT])
def test_both_sides_are_built_on_the_device_before_any_run(measured, monkeypatch):
    monkeypatch.setitem(DTYPES, "meta", torch.bfloat16)
    calls = []

    def make(side, **shape):
        calls.append(("make", side, torch.empty(0)))
        return lambda: calls.append(("run", side, torch.empty(0))) or 0.25

    monkeypatch.setattr(bench_pairs, "MIN_SECONDS", 0)
    bench([Case("a", "a", "b", make, {}, measured=measured)], 2, "meta")
    assert [(done, side) for done, side, _ in calls[:2]] == [("make", True), ("make", False)]
    assert {(done, x.device.type, x.dtype) for done, _, x in calls} == {
        ("make", "meta", torch.bfloat16),
        ("run", "cpu", torch.float32),
    }


def test_memory_cases_are_limited_to_three_rounds(monkeypatch):
    sides = []
    monkeypatch.setattr(bench_run, "peak_bytes", lambda case, ours, device: sides.append(ours) or 2 + ours)
    case = next(case for case in ATTENTION if case.name == "talking-step-memory")
    figures = bench([case], 9)["cases"]["talking-step-memory"]
    assert figures["rounds"] == 3 and figures["ratios"] == [1.5] * 3 and figures["unit"] == "bytes"
    assert sides == [False, True, True, False, False, True]


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (2.5, "seconds", "2.5 s"),
        (0.0123456, "seconds", "12.3 ms"),
        (3e-5, "seconds", "30 us"),
        (4.2e9, "bytes", "4.2 GB"),
        (65536, "bytes", "65.5 kB"),
        (0, "bytes", "0 B"),
        (-7, "bytes", "-7 B"),
    ],
)
def test_amount_formats_seconds_and_bytes(value, unit, words):
    assert amount(value, unit) == words


def test_attention_and_decode_commands(tmp_path, monkeypatch, capfd):
    case = next(case for case in ATTENTION if case.name == "mixture-half-4096")
    small = replace(case, shape=case.shape | {"tokens": 40})
    monkeypatch.setattr(bench_cases, "ATTENTION", [small, replace(small, name="mixture-half-2048")])
    status, out, err = run(capfd, monkeypatch, f"bench attention mixture-half-4096 --rounds 2 --out {tmp_path}/a.json")
    assert status == 0 and out.splitlines()[1].startswith("mixture-half-4096 ")
    assert err.count("\n") == 1 and "mixture-half-4096" in err
    report = json.loads((tmp_path / "a.json").read_text())
    assert list(report["cases"]) == ["mixture-half-4096"] and report["cases"]["mixture-half-4096"]["rounds"] == 2
    status, out, err = run(capfd, monkeypatch, "bench decode cache --rounds 1")
    assert status == 0 and out.splitlines()[1].split()[:7] == ["cache", "131", "kB", "262", "kB", "0.500", "0.500"]


@pytest.mark.compile
def test_compiled_command(monkeypatch, capfd):
    (case,) = (case for case in COMPILED if case.name == "explicit-step")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 50, "tokens": 16}
    monkeypatch.setattr(bench_cases, "COMPILED", [replace(case, shape=case.shape | sizes)])
    monkeypatch.setattr(bench_models, "COMPILER_BACKEND", "eager")
    status, out, err = run(capfd, monkeypatch, "bench compiled explicit-step --rounds 1")
    assert status == 0, err
    assert out.splitlines()[1].startswith("explicit-step ")


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ("attention mixture-haf-2048", 1, "'mixture-haf-2048'"),
        ("decode cash", 1, "'cache'"),
        ("decode grouped-8k cache x", 1, "'x'"),
        ("convert neutrl", 1, "'neutral'"),
        ("decode cache --device cuda", 1, "--device cuda"),
        ("compiled explicit", 1, "'explicit'"),
        ("decode cache --device tpu", 2, "'tpu'"),
        ("decode cache --out none/a.json", 1, "none/a.json"),
        ("attention --rounds 0", 2, "--rounds"),
        ("convert --gigabytes 0", 2, "--gigabytes"),
        ("convert --device cpu", 2, "--device"),
        ("convert --gigabytes 1e9", 2, "--gigabytes"),
    ],
)
def test_wrong_arguments_are_refused(command, status, words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    exit_status, out, err = run(capfd, monkeypatch, f"bench {command}")
    assert (exit_status, out) == (status, "") and words in err and "Traceback" not in err
    if status == 1:
        assert err.splitlines()[-1].startswith("crosshead: error: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_interrupted_benchmark_writes_no_files(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_run, "measure_alternating", interrupted)
    status, out, err = run(capfd, monkeypatch, "bench decode cache --out a.json")
    assert (status, out) == (130, "") and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", first(KNOWN))
def test_help_lists_exactly_the_known_cases_without_importing_torch(name):
    code = "import sys; sys.argv = ['crosshead', 'bench', sys.argv[1], '--help']\n"
    code += "from crosshead_command.main import main\ntry:\n    main()\n"
    code += "finally:\n    print(*{'torch', 'crosshead'} & sys.modules.keys(), file=sys.stderr)"
    environment = os.environ | {"COLUMNS": "200"}
    command = [sys.executable, "-P", "-c", code, name]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stderr.split() == []
    listed = {
        word.strip(",") for line in re.findall(r"^  (?! )(.*)", done.stdout, re.MULTILINE) for word in line.split()
    }
    assert KNOWN[name] <= listed
    head = done.stdout.partition("Arguments:")[0]
    named = set(re.findall(r"\b[a-z]+(?:-[a-z0-9]+)+\b", head)) - {"beside-sdpa"}
    assert named <= KNOWN[name]


@pytest.mark.slow
def test_speed_tables_render_a_decode_report(three_cases, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "measure"))
    tables = importlib.import_module("tables")
    (tmp_path / "decode.json").write_text(json.dumps(bench(three_cases, 3)))
    text = tables.speed_tables(tmp_path)
    assert any("`crosshead bench attention`" in line and "not measured" in line for line in text.splitlines())
    (row,) = (line for line in text.splitlines() if line.startswith("| `slow` |"))
    for words in ("slow in words", "a baseline", "1.6 GB/s", "2 GB/s", "1.500 (1.000 to 2.000)", "missed"):
        assert words in row
    for words in (f"torch {torch.__version__}", "bfloat16", "float32", "3 rounds"):
        assert words in text


@pytest.mark.slow
def test_speed_tables_render_a_gpu_report(three_cases, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "measure"))
    tables = importlib.import_module("tables")
    assert "not measured" in tables.speed_tables(tmp_path).splitlines()[-2]
    called = bench(three_cases, 3) | {"device": "cuda", "machine": {"accelerator": "H9", "threads": 2} | VERSIONS}
    report = {"called": called, "queued": called | {"device": "cuda, queued"}, "launches": {"forward": 150}}
    (tmp_path / "gpu.json").write_text(json.dumps({"speed": report}))
    text = tables.speed_tables(tmp_path)
    assert "150 forward" in text
    assert text.count("1.500 (1.000 to 2.000)") == text.count("H9, 2 threads") == 2
