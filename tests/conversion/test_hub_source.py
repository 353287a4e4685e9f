import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import toys
from broken import INDEX
from hub_server import COMMIT, Repository, serving
from toy_checkpoints import MANY_SHARDS
from toy_tokenizer import toy_tokenizer

CLIENT = """
import json, sys, time
from pathlib import Path
from crosshead.conversion.errors import ConversionError
from crosshead.conversion.sources import open_source
time.sleep = lambda seconds: None  # the Hub's client waits between attempts
results = []
for name, revision in json.loads(sys.argv[1]):
    try:
        source = open_source(name, revision, scratch=Path(sys.argv[2]))
    except ConversionError as error:
        results.append(str(error))
        continue
    folder = source.store.folder
    results.append({
        "origin": source.origin,
        "config": source.config["model_type"],
        "files": sorted(file.name for file in source.files),
        "downloaded": sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()),
        "links": (folder / "model.safetensors").is_symlink(),
        "bytes": sum(len(chunk) for name in source.store.entries for chunk in source.store.chunks(name)),
        "fingerprint": source.fingerprint,
    })
print(json.dumps(results))
"""
TOKEN = "hf_secretsecretsecret"
ODD = "model.safetensors-{}"
"""What some call their shards: `ODD` and the usual ending."""
SIDE = ["LICENSE", "additional_chat_templates", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]


def ask(address: str, home: Path, wanted: list[tuple[str, str | None]], **environment: str) -> list[Any]:
    # In a process of its own, because the Hub's address is read when its client is imported.
    settings = {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    settings |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", CLIENT, json.dumps(wanted), str(home / "scratch")],
        env=os.environ | settings | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert TOKEN not in done.stdout
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    toys.stock_model("Llama").save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    found = {file.name: file.read_bytes() for file in folder.iterdir()}
    never = ["pytorch_model.bin", "modeling_toy.py", "README.md", "original/consolidated.safetensors", "LICENSE.py"]
    more = {"LICENSE": b"free", "additional_chat_templates/tools.jinja": b"{{ messages }}"}
    return found | more | dict.fromkeys(never, b"never")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory, files):
    folder = tmp_path_factory.mktemp("sharded")
    toys.stock_model("Llama").save_pretrained(folder, max_shard_size=MANY_SHARDS)
    made = {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}
    odd = {name: ODD.format(name.removeprefix("model-")) for name in made}
    index = (folder / INDEX).read_text()
    for name, other in odd.items():
        index = index.replace(name, other)
    others = {name: raw for name, raw in files.items() if not name.endswith(".safetensors")}
    return others | {odd[name]: raw for name, raw in made.items()} | {INDEX: index.encode()}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, files, sharded):
    home = tmp_path_factory.mktemp("home")
    pickled = {name: raw for name, raw in files.items() if not name.endswith(".safetensors")}
    repositories = {
        "org/toy": Repository(files, revisions=("main", "v1", COMMIT)),
        "org/broken": Repository(files, dropped=2),
        "org/gated": Repository(files, gated=True),
        "org/private": Repository(files, status=401),
        "org/down": Repository(files, status=410),
        "org/silent": Repository(files, status=0),
        "org/dropping": Repository(files, dropped=1000),
        "org/pickled": Repository(pickled),
        "org/sharded": Repository(sharded | {"consolidated.safetensors": b"never"}),
        "org/gguf": Repository({"toy.Q8_0.gguf": b"GGUF"}),
        "org/bare": Repository({"model.safetensors": files["model.safetensors"]}),
    }
    wanted = [(name, None) for name in repositories] + [("org/toy", "v1"), ("org/toy", "v2"), ("org/none", None)]
    with serving(repositories) as hub:
        online = ask(hub.address, home, wanted)
    asked = [("org/toy", None), ("org/toy", "v1"), ("org/gated", None)]
    offline = ask(hub.address, home, asked, HF_HUB_OFFLINE="1")
    results = dict(zip(wanted, online, strict=True))
    results |= {("offline", *key): result for key, result in zip(asked, offline, strict=True)}
    return results | {"requests": hub.requests}


def test_what_is_needed_is_downloaded_and_nothing_else(outcomes, files):
    found = outcomes["org/toy", None]
    assert found["origin"] == {"kind": "hub", "name": "org/toy", "revision": COMMIT}
    assert found["config"] == "llama"
    assert found["files"] == SIDE
    assert found["downloaded"] == sorted(
        {*SIDE, "config.json", "model.safetensors"} - {SIDE[1]} | {"additional_chat_templates/tools.jinja"}
    )
    assert found["links"]
    assert 0 < found["bytes"] < len(files["model.safetensors"])
    fetched = [request for request in outcomes["requests"] if "/resolve/" in request]
    assert not [request for request in fetched if request.endswith((".bin", ".py", ".md", "consolidated.safetensors"))]


def test_shards_are_those_of_the_index(outcomes, sharded):
    found = outcomes["org/sharded", None]
    shards = [name for name in sharded if name.startswith(ODD.format(""))]
    assert len(shards) > 2
    assert {name for name in found["downloaded"] if ".safetensors" in name} == {INDEX, *shards}
    assert found["bytes"] == outcomes["org/toy", None]["bytes"]


def test_a_download_that_breaks_off_is_continued(outcomes):
    assert outcomes["org/broken", None]["bytes"] == outcomes["org/toy", None]["bytes"]


def test_a_revision(outcomes):
    assert outcomes["org/toy", "v1"] == outcomes["org/toy", None]


def test_the_cache_serves_where_there_is_no_network(outcomes):
    assert outcomes["offline", "org/toy", None] == outcomes["org/toy", None]
    assert outcomes["offline", "org/toy", "v1"] == outcomes["org/toy", None]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (("org/none", None), "private"),
        (("org/private", None), "401"),
        (("org/gated", None), "gated"),
        (("org/down", None), "410"),
        (("org/toy", "v2"), "'v2'"),
        (("org/pickled", None), "pickle"),
        (("org/gguf", None), "GGUF"),
        (("org/bare", None), "config.json"),
        (("offline", "org/gated", None), "cache"),
        (("org/silent", None), "RemoteProtocolError"),
        (("org/dropping", None), "RemoteProtocolError"),
    ],
)
def test_one_line_on_what_is_wrong(outcomes, wanted, message):
    assert isinstance(outcomes[wanted], str)
    assert message in outcomes[wanted]
    assert "\n" not in outcomes[wanted]
    assert "127.0.0.1" not in outcomes[wanted]
