"""Every command works, writes only fields documented in formats.md, and leaks no access token."""

import json
import re

import pytest
from safetensors import safe_open

from broken import snapshot
from command_chain import CALIBRATED, COMMANDS, ENVIRONMENT, FILES, LEFT_WITH_IT, PLANTED, run_chain
from demo_checks import check_made
from rules import ROOT

FORMATS = (ROOT / "conversion" / "formats.md").read_text(encoding="utf-8")
CONVERT, FOLD = "convert source made --mixer knocking:form=linear", "fold made back"
SPEED = ["training", "prefill", "decode"]


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    return run_chain(tmp_path_factory.mktemp("chain"))


@pytest.fixture
def report(chain):
    """Return a function that reads a JSON file written by a command."""
    return lambda path: json.loads((chain.folder / path).read_text())


def keys_of(content):
    """Return all keys in nested JSON that look like field names (not tensor names or numbers)."""
    if isinstance(content, list):
        return set().union(*map(keys_of, content))
    if not isinstance(content, dict):
        return set()
    names = {key for key in content if re.fullmatch(r"[a-z][a-z_0-9]*", key)}
    return names | set().union(*(keys_of(value) for value in content.values()))


def fields_in(heading):
    """Return the field names that a section of formats.md mentions."""
    section = FORMATS.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert section
    return set(re.findall(r"[a-z][a-z_0-9]*", " ".join(re.findall(r"`([^`]+)`", section))))


def files_containing(folder, token):
    """Return the relative paths of the files that contain a token."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix() for path in files if token.encode() in path.read_bytes()}


def test_every_command_succeeds(chain):
    assert chain.statuses == COMMANDS, chain.stderr[-4000:]
    results = ("made", "back", "heads", "seen.safetensors", "run/model", "eval.json", "page.html", "bench.json")
    assert [path for path in results if not (chain.folder / path).exists()] == []


def test_convert_verify_and_fold_restore_the_source(chain, report):
    out, err = chain.output(CONVERT)
    assert err == "" and "created" in out
    assert (
        report("made/conversion.json")["verification"]
        == json.loads(chain.output("verify source made --json")[0])["verification"]
    )
    assert report("made/conversion.json")["verification"]["must_equal"]
    assert chain.output(FOLD)[1] == ""
    back, source = (snapshot(chain.folder / name)["model.safetensors"][1] for name in ("back", "source"))
    assert back == source


def test_demo_creates_models_with_cards(chain):
    models = [f"tiny-llama-{name}" for name in ("knocking", "explicit", "mixture", "explicit-trained")]
    check_made(chain.folder / "crosshead-demo-tiny", chain.output("demo --tiny")[0], models)


def test_environment_token_is_in_no_output(chain):
    assert files_containing(chain.folder, ENVIRONMENT) == set()
    assert ENVIRONMENT not in chain.stdout + chain.stderr


def test_token_in_model_files_is_not_copied(chain):
    assert files_containing(chain.folder, PLANTED) == LEFT_WITH_IT
    assert PLANTED not in chain.stdout + chain.stderr
    assert "ours/config.json" in chain.output("push ours me/ours")[1]
    assert (chain.folder / "hub" / "config.json").is_file()


def test_conversion_json_lists_fields_left_out(report):
    named = report("made/conversion.json")["left_out"]
    assert list(named) == list(FILES)
    assert all(sorted(names) == ["kept.key", "lines", "use_auth_token"] for names in named.values())
    for made in ("made", "back", "run/model"):
        assert report(f"{made}/config.json")["kept"] == {"by": "us"}, made


def test_conversion_json_has_only_documented_fields(chain, report):
    made = report("heads/conversion.json")
    del made["options"]["mixers"], made["options"]["choices"], made["versions"], made["left_out"]
    assert keys_of(made) - fields_in("conversion.json") == set()
    with safe_open(chain.folder / "heads" / "model.safetensors", "pt") as file:
        new = {name.partition(".mixers.")[2] for name in file.keys() if ".mixers." in name}  # noqa: SIM118
    assert new == {"explicit.key.weight", "explicit.value.weight"} and "mixture" in CALIBRATED
    chosen = report("chosen/conversion.json")["chosen"]
    figures = {"losses", "key_heads", "value_heads", "cache", "expected_divergence"}
    assert {"text", "sha256"} | figures == chosen.keys() <= fields_in("conversion.json")


def test_training_run_has_only_documented_fields(chain, report):
    lines = [json.loads(line) for line in (chain.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    named = fields_in("A training run")
    assert report("run/model/training.json").keys() <= named
    keys = {key.partition("/")[0] for line in lines for key in line if not key.startswith("eval_")}
    assert keys - {"epoch"} - named == set()
    caches = [json.loads(path.read_text()) for path in chain.folder.rglob("tokens/*/cache.json")]
    assert caches and set().union(*caches) <= named
    assert {"run.json", "metrics.jsonl", "model", ".lock"} <= {path.name for path in (chain.folder / "run").iterdir()}


def test_measurements_have_only_documented_fields(chain, report):
    named = fields_in("Scores and other measurements")
    costs = json.loads(chain.output("cost made --json")[0])
    figures = {f"{phase}_{unit}" for phase in SPEED for unit in ("flops", "multiplications")}
    assert costs.keys() <= named and costs["cost"].keys() - figures <= named
    for scores in (report("eval.json"), report("rows.json")):
        for entry in (scores, *scores["models"], *scores["compared"], scores.get("data", {})):
            assert entry.keys() <= named
            assert all(row.keys() <= named for row in entry.get("scores", ()))
    page = report("page.json")
    for model in page["models"]:
        for entry in (
            page,
            model,
            *model["texts"],
            *model["texts"][0]["layers"],
            model["texts"][0]["layers"][0]["maps"],
        ):
            assert entry.keys() <= named
    heads = report("heads.json")
    assert heads.keys() <= named and all(row.keys() <= named for row in heads["models"]["made"])
