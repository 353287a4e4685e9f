"""`crosshead demo --model` with a folder, a name on the Hub and a GGUF file."""

import json
import os
import subprocess
import sys

import pytest

import gguf_toys
from broken import run, snapshot
from crosshead.demo.sources import own
from demo_checks import check_made
from hub_server import COMMIT, Repository, serving
from toy_eval import write_scorable
from toys import stock_model

MADE = ["knocking", "explicit", "mixture", "explicit-trained"]


@pytest.fixture
def run_cli(capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda command: run(capfd, monkeypatch, command)


@pytest.mark.slow
def test_demo_of_model_folder(run_cli, tmp_path):
    """With a single key/value head, `explicit` cannot shrink the cache: the demo skips it."""
    model = stock_model("Qwen3", num_key_value_heads=1, max_position_embeddings=1024)
    write_scorable(model, tmp_path / "mine")
    before = snapshot(tmp_path)
    status, out, err = run_cli("demo --model mine --out here")
    assert status == 0
    assert {"explicit", "2", "1"} <= {*err.splitlines()[0].split()}
    rows = check_made(tmp_path / "here", out, ["mine-knocking", "mine-mixture", "mine-mixture-trained"])
    assert list(rows) == ["source", "knocking", "mixture", "mixture-trained"]
    assert rows["source"]["model"] == "mine"
    assert {key: value for key, value in snapshot(tmp_path).items() if not key.startswith("here")} == before


@pytest.mark.slow
def test_demo_of_hub_model(tmp_path):
    """In a subprocess with a local test Hub; the second run downloads no weights."""
    model = stock_model("Llama", max_position_embeddings=1024)
    files = {file.name: file.read_bytes() for file in write_scorable(model, tmp_path / "mine").iterdir()}
    command = [sys.executable, "-P", "-m", "crosshead", "demo", "--model", "org/toy", "--out", "here"]
    with serving({"org/toy": Repository(files)}) as hub:
        settings = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        settings |= {"NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1"}

        def demo():
            return subprocess.run(
                command, cwd=tmp_path, env=os.environ | settings, capture_output=True, text=True, check=True
            )

        first = demo()
        first_requests = len(hub.requests)
        again = demo()
        later_requests = hub.requests[first_requests:]
    rows = check_made(tmp_path / "here", first.stdout, [f"toy-{name}" for name in MADE])
    assert rows["source"]["model"] == "org/toy"
    record = json.loads((tmp_path / "here" / "toy-knocking" / "conversion.json").read_text())
    assert (record["source"]["name"], record["source"]["revision"]) == ("org/toy", COMMIT)
    assert again.stdout == first.stdout
    assert not [request for request in later_requests if request.startswith("GET") and "safetensors" in request]


@pytest.mark.slow
def test_demo_of_gguf_file(run_cli, tmp_path):
    """The GGUF file is unpacked into a stock checkpoint, the baseline of the comparison."""
    model = gguf_toys.model("Llama", max_position_embeddings=1024)
    gguf_toys.write_model(tmp_path / "toy.Q8.gguf", model, "Llama", {"weight": "Q8_0"})
    status, out, err = run_cli("demo --model toy.Q8.gguf --out here")
    assert status == 0, err
    rows = check_made(tmp_path / "here", out, [f"toy.Q8-{name}" for name in MADE])
    assert rows["source"]["model"] == "here/toy.Q8"
    assert json.loads((tmp_path / "here" / "toy.Q8" / "config.json").read_text())["model_type"] == "llama"


def test_gguf_model_is_labelled_by_its_file_name(tmp_path):
    gguf_toys.write_model(tmp_path / "inside" / "toy.Q8.gguf", gguf_toys.model("Llama"), "Llama")
    start = own(str(tmp_path / "inside"), tmp_path / "out")
    assert (start.label, start.heads) == ("toy.Q8", (4, 2))
    assert start.origin == str(tmp_path / "inside" / "toy.Q8.gguf")
    assert start.name == str(tmp_path / "out" / "toy.Q8")
