"""The page on formats names the fields of what commands write."""

import json
import re
from pathlib import Path

import pytest
from huggingface_hub import constants
from safetensors import safe_open

import document_commands as shown
from broken import run
from house import ROOT

FORMATS = (ROOT / "conversion" / "formats.md").read_text(encoding="utf-8")


def keys_of(content):
    """Every key of a JSON object that is a name, and not a tensor's or a number."""
    if isinstance(content, list):
        return set().union(*map(keys_of, content))
    if not isinstance(content, dict):
        return set()
    found = {key for key in content if re.fullmatch(r"[a-z][a-z_]*", key)}
    return found | set().union(*(keys_of(value) for value in content.values()))


def fields_in(heading):
    """All that a section of the formats names."""
    section = FORMATS.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert section
    return set(re.findall(r"[a-z][a-z0-9_]*", " ".join(re.findall(r"`([^`]+)`", section))))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    shown.prepare(folder)
    return folder


@pytest.fixture
def command(written, monkeypatch, capfd):
    monkeypatch.chdir(written)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def done(arguments):
        status, out, err = run(capfd, monkeypatch, arguments)
        assert status == 0, err
        return out

    return done


@pytest.mark.slow
def test_conversion_json_has_the_fields_that_are_named(command):
    mixers = "--mixer explicit:key_heads=2,value_heads=2 --mixer mixture:active_heads=7,shared=calibrated"
    command(f"convert source made {mixers} --calibration text.txt")
    made = json.loads(Path("made/conversion.json").read_text())
    del made["options"]["mixers"], made["options"]["choices"], made["versions"]
    assert keys_of(made) - fields_in("conversion.json") == set()
    with safe_open("made/model.safetensors", "pt") as file:
        new = {name.partition(".mixers.")[2] for name in file.keys() if ".mixers." in name}  # noqa: SIM118
    assert new == {"explicit.key.weight", "explicit.value.weight"}
    command("convert source made --mixer explicit --layers auto --budget 0.8 --calibration text.txt --overwrite")
    chosen = json.loads(Path("made/conversion.json").read_text())["chosen"]
    assert {"text", "sha256", "losses", "key_heads", "value_heads"} == chosen.keys() <= fields_in("conversion.json")


@pytest.mark.slow
def test_a_run_has_the_fields_that_are_named(command):
    command("train small/smollm2_mixture --toy toy")
    result = json.loads(Path("toy/run/model/training.json").read_text())
    lines = [json.loads(line) for line in Path("toy/run/metrics.jsonl").read_text().splitlines()]
    named = fields_in("A training run")
    assert result.keys() <= named
    found = {key.partition("/")[0] for line in lines for key in line if not key.startswith("eval_")}
    assert found - {"epoch"} - named == set()
    (cache,) = {tuple(json.loads(path.read_text())) for path in Path("toy/tokens").glob("*/cache.json")}
    assert set(cache) <= named
    assert {"run.json", "metrics.jsonl", "model", ".lock"} <= {path.name for path in Path("toy/run").iterdir()}


@pytest.mark.slow
def test_measurements_have_the_fields_that_are_named(command):
    named = fields_in("Scores and other measurements")
    report = json.loads(command("cost model --json"))
    figures = {
        f"{phase}_{unit}" for phase in ("training", "prefill", "decode") for unit in ("flops", "multiplications")
    }
    assert report.keys() <= named and report["cost"].keys() - figures <= named
    command("eval source model --suite offline --limit 2 --compare --out eval.json")
    report = json.loads(Path("eval.json").read_text())
    for each in (report, *report["models"], *report["compared"]):
        assert each.keys() <= named
        assert all(row.keys() <= named for row in each.get("scores", ()))
    command("inspect model --text hello --out page.html")
    report = json.loads(Path("page.json").read_text())
    (model,) = report["models"]
    for each in (report, model, *model["texts"], *model["texts"][0]["layers"], model["texts"][0]["layers"][0]["maps"]):
        assert each.keys() <= named
    command("probe heads source --text text.txt --windows 1 --length 64 --draws 1")
    report = json.loads(Path("heads.json").read_text())
    assert report.keys() <= named and all(row.keys() <= named for row in report["models"]["source"])
