"""`crosshead push`: checks, dry run, upload to a loopback Hub, and loading from there with remote code."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import crosshead
from broken import run, snapshot
from card_toys import converted, write_report
from crosshead_command.card import write_card
from crosshead_command.push import release
from hub_client import own_hub
from hub_server import Repository
from toy_checkpoints import write_model
from toys import MECHANISM_CASES, mixed_model, tokens

TOKEN = "hf_" + "planted" * 5
LOAD = """
import json, sys
sys.modules["crosshead"] = None
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
names, tokens, path, revision = json.loads(sys.argv[1])
logits = {}
for name in names:
    options = {"trust_remote_code": True, "revision": revision}
    AutoTokenizer.from_pretrained(name, **options)
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="eager", **options).eval()
    with torch.no_grad():
        logits[name] = model(torch.tensor(tokens)).logits
save_file(logits, path)
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = converted(tmp_path_factory.mktemp("push") / "made", verify=False)
    write_card(folder)
    return folder


@pytest.fixture
def made(whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(whole, "made"))


@pytest.fixture
def run_cli(capfd, monkeypatch):
    return lambda command: run(capfd, monkeypatch, command)


@pytest.fixture
def hub(monkeypatch):
    with own_hub(monkeypatch, TOKEN) as running:
        disable_progress_bars()
        yield running
        enable_progress_bars()


@pytest.fixture
def without_reload_check(monkeypatch):
    """Skip the reload check: loading in a new process takes seconds, and two tests cover it."""
    check = "crosshead.conversion.verification.reload.reload_check"
    monkeypatch.setattr(check, lambda folder, inputs, auto_class: ({}, None))


def test_dry_run_lists_files_without_requests(made, run_cli, hub, without_reload_check):
    before = snapshot(made)
    status, out, err = run_cli("push made org/model --dry-run")
    assert (status, err) == (0, "")
    *files, total = out.splitlines()
    assert {listed.split()[-1] for listed in files} == {path.name for path in made.iterdir()}
    assert all(word in total for word in ("org/model", "private", release()))
    assert hub.requests == [] and snapshot(made) == before


@pytest.mark.slow
def test_push_uploads_files_and_tags_the_release(made, run_cli, hub):
    hub.failing["commit"] = 1
    status, out, err = run_cli("push made org/model")
    assert (status, err) == (0, "") and f"{hub.address}/org/model" in out and release() in out
    assert "not part of the model" not in out
    repository = hub.repositories["org/model"]
    assert repository.private and repository.files == {path.name: path.read_bytes() for path in made.iterdir()}
    assert repository.tags == {release(): repository.commit} and hub.tokens == {TOKEN}
    before = repository.commit
    (made / "note.md").write_text("more\n")
    status, out, err = run_cli("push made org/model")
    assert status == 0 and release() in out and before[:12] in out and "not part of the model: 'note.md'\n" in out
    assert repository.files["note.md"] == b"more\n" and "note.md" not in repository.at(release())


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ("push", 2, "Usage"),
        ("push made", 2, "REPO_ID"),
        ("push made a/b/c", 2, "'a/b/c'"),
        ("push made org/model --publik", 2, "--public"),
        ("push nowhere org/model", 1, "nowhere"),
        ("push foreign org/model", 1, "modeling_crosshead.py"),
        ("push broken org/model", 1, "form='unheard of'"),
        ("push bare org/model", 1, "`crosshead card bare`"),
    ],
)
def test_wrong_arguments_are_refused(made, run_cli, hub, command, status, words):
    for name in ("foreign", "broken", "bare"):
        shutil.copytree(made, name)
    (made.parent / "bare/README.md").unlink()
    with (made.parent / "foreign/modeling_crosshead.py").open("a") as file:
        file.write("# mine\n")
    content = json.loads((made.parent / "broken/config.json").read_text())
    content["mixers"] = {"knocking": {"form": "unheard of"}}
    (made.parent / "broken/config.json").write_text(json.dumps(content))
    before = snapshot(made.parent)
    exit_status, out, err = run_cli(command)
    assert exit_status == status and words in " ".join((out + err).split())
    assert status == 2 or (out == "" and err.count("\n") == 1)
    assert hub.repositories == {} and snapshot(made.parent) == before


def test_existing_public_repository_needs_public_option(made, run_cli, hub, without_reload_check):
    hub.repositories["org/model"] = Repository({})
    status, out, err = run_cli("push made org/model")
    assert (status, out) == (1, "") and "org/model" in err and "public" in err
    assert hub.repositories["org/model"].files == {}
    assert run_cli("push made org/model --public")[0] == 0
    assert "config.json" in hub.repositories["org/model"].files


def folded(folder, monkeypatch):
    """Fold a converted model into a stock one under `folder` and return the stock model, loaded."""
    monkeypatch.chdir(folder)
    converted(Path("linear"), {"knocking": {"form": "linear"}}, verify=False)
    crosshead.fold("linear", "folded", verify=False)
    return AutoModelForCausalLM.from_pretrained("folded", attn_implementation="eager").eval()


@pytest.mark.slow
def test_pushed_models_load_from_hub_with_the_same_logits(tmp_path, hub, run_cli, monkeypatch):
    ids, expected = tokens(), {}
    models = {"folded": folded(tmp_path, monkeypatch)}
    for mechanism, mixers in MECHANISM_CASES.items():
        models[mechanism] = mixed_model("Qwen3", mixers)
        write_model(models[mechanism], Path(mechanism), shard_size=12_000)
    for name, model in models.items():
        expected[f"org/{name}"] = model(ids).logits.detach()
        write_card(Path(name))
        status, _, err = run_cli(f"push {name} org/{name}")
        assert (status, err) == (0, "")
    assert not [name for name in hub.repositories["org/folded"].files if name.endswith(".py")]
    result = tmp_path / "logits.safetensors"
    settings = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    settings |= {"NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}
    arguments = json.dumps([list(expected), ids.tolist(), str(result), release()])
    command = [sys.executable, "-P", "-c", LOAD, arguments]
    done = subprocess.run(
        command, env=os.environ | settings, cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    loaded = load_file(result)
    assert loaded.keys() == expected.keys() and len(loaded) == len(models)
    for name, logits in expected.items():
        assert (loaded[name] - logits).abs().max() <= 1e-5 * logits.abs().max(), name


def test_commands_neither_print_nor_write_the_token(made, run_cli, hub, without_reload_check):
    write_report(Path("eval.json"), "made")
    results = [
        run_cli(f"{command}") for command in ("card made --eval eval.json", "push made org/model", "zoo", "card made")
    ]
    hub.accepted = set()
    results.append(run_cli("push made org/model --debug"))
    content = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(content | {"note": TOKEN}))
    results += [
        run_cli("push made org/model --debug"),
        run_cli("push made org/model --dry-run"),
        run_cli("card made --debug"),
    ]
    assert [status for status, *_ in results] == [0, 0, 0, 0, 1, 1, 1, 0]
    assert "config.json" in results[5][2] and "token" in results[5][2]
    assert not any(TOKEN in text for _, out, err in results for text in (out, err))
    for path in made.parent.rglob("*"):
        if path.is_file() and path.name != "config.json":
            assert TOKEN.encode() not in path.read_bytes(), path
    assert not any(TOKEN.encode() in raw for raw in hub.repositories["org/model"].files.values())
