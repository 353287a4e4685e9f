import json
import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session, constants

import toys
from broken import INDEX
from crosshead.common.errors import ConversionError
from crosshead.conversion.sources.resolve import open_source
from hub_server import COMMIT, Repository, serving
from toy_checkpoints import MANY_SHARDS
from toy_tokenizer import toy_tokenizer

TOKEN = "hf_secretsecretsecret"
ODD = "model.safetensors-{}"
"""Format of the shard names in some repositories; the field is the usual ending."""
SIDE = ["LICENSE", "additional_chat_templates", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]


def open_from_hub(
    address: str, home: Path, requests: list[tuple[str, str | None]], offline: bool = False
) -> list[Any]:
    """Open each (name, revision) from the Hub at `address`; return a summary of each source, or its error message."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", address)
        patch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_HUB_OFFLINE", offline)
        patch.setenv("HF_TOKEN", TOKEN)
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setattr(time, "sleep", lambda seconds: None)  # the client waits between attempts
        close_session()
        results = [summary_or_error(name, revision, home / "scratch") for name, revision in requests]
    close_session()
    assert TOKEN not in json.dumps(results)
    return results


def summary_or_error(name: str, revision: str | None, scratch: Path) -> Any:
    try:
        source = open_source(name, revision, scratch=scratch)
    except ConversionError as error:
        return str(error)
    folder = source.store.folder
    return {
        "origin": source.origin,
        "config": source.config["model_type"],
        "files": sorted(file.name for file in source.files),
        "downloaded": sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()),
        "links": (folder / "model.safetensors").is_symlink(),
        "bytes": sum(len(chunk) for entry in source.store.entries for chunk in source.store.chunks(entry)),
        "fingerprint": source.fingerprint,
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    toys.stock_model("Llama").save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    model_files = {file.name: file.read_bytes() for file in folder.iterdir()}
    never = ["pytorch_model.bin", "modeling_toy.py", "README.md", "original/consolidated.safetensors", "LICENSE.py"]
    more = {"LICENSE": b"free", "additional_chat_templates/tools.jinja": b"{{ messages }}"}
    return model_files | more | dict.fromkeys(never, b"never")


@pytest.fixture(scope="module")
def sharded_files(tmp_path_factory, files):
    folder = tmp_path_factory.mktemp("sharded")
    toys.stock_model("Llama").save_pretrained(folder, max_shard_size=MANY_SHARDS)
    made = {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}
    odd = {name: ODD.format(name.removeprefix("model-")) for name in made}
    index = (folder / INDEX).read_text()
    for name, other in odd.items():
        index = index.replace(name, other)
    others = {name: raw for name, raw in files.items() if not name.endswith(".safetensors")}
    return others | {odd[name]: raw for name, raw in made.items()} | {INDEX: index.encode()}


REFUSED = {
    "mistral": {"model_type": "mistral"},
    "fp8": {"quantization_config": {"quant_method": "fp8"}},
}
"""Text in the error message -> changes of config.json, for models that cannot be converted."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, files, sharded_files):
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
        "org/sharded": Repository(sharded_files | {"consolidated.safetensors": b"never"}),
        "org/gguf": Repository({"toy.Q8_0.gguf": b"GGUF"}),
        "org/bare": Repository({"model.safetensors": files["model.safetensors"]}),
    }
    config = json.loads(files["config.json"])
    for name, changes in REFUSED.items():
        repositories[f"org/{name}"] = Repository(files | {"config.json": json.dumps(config | changes).encode()})
    repositories["org/adapter"] = Repository(files | {"adapter_config.json": b"{}"})
    models = [(name, None) for name in repositories] + [("org/toy", "v1"), ("org/toy", "v2"), ("org/none", None)]
    models += [("org/toy@v1", None), ("org/toy@v2", None)]
    with serving(repositories) as hub:
        online = open_from_hub(hub.address, home, models)
    shards = sorted((home / "hub" / "models--org--sharded" / "snapshots" / COMMIT).glob(ODD.format("*")))
    shards[1].unlink()
    offline_requests = [("org/toy", None), ("org/toy", "v1"), ("org/gated", None), ("org/sharded", None)]
    offline = open_from_hub(hub.address, home, offline_requests, offline=True)
    results = dict(zip(models, online, strict=True))
    results |= {("offline", *key): result for key, result in zip(offline_requests, offline, strict=True)}
    return results | {"requests": hub.requests}


def test_only_needed_files_are_downloaded(outcomes, files):
    summary = outcomes["org/toy", None]
    assert summary["origin"] == {"kind": "hub", "name": "org/toy", "revision": COMMIT}
    assert summary["config"] == "llama"
    assert summary["files"] == SIDE
    assert summary["downloaded"] == sorted(
        {*SIDE, "config.json", "model.safetensors"} - {SIDE[1]} | {"additional_chat_templates/tools.jinja"}
    )
    assert summary["links"]
    assert 0 < summary["bytes"] < len(files["model.safetensors"])
    fetched = [request for request in outcomes["requests"] if "/resolve/" in request]
    assert not [request for request in fetched if request.endswith((".bin", ".py", ".md", "consolidated.safetensors"))]


@pytest.mark.parametrize("name", [*REFUSED, "adapter"])
def test_unsupported_model_is_refused_before_its_weights_are_downloaded(outcomes, name):
    assert name in outcomes[f"org/{name}", None]
    fetched = [path.rpartition("/")[2] for path in outcomes["requests"] if f"/org/{name}/resolve/" in path]
    assert "config.json" in fetched and "model.safetensors" not in fetched


def test_only_shards_of_index_are_downloaded(outcomes, sharded_files):
    summary = outcomes["org/sharded", None]
    shards = [name for name in sharded_files if name.startswith(ODD.format(""))]
    assert len(shards) > 2
    assert {name for name in summary["downloaded"] if ".safetensors" in name} == {INDEX, *shards}
    assert summary["bytes"] == outcomes["org/toy", None]["bytes"]


def test_interrupted_download_is_resumed(outcomes):
    assert outcomes["org/broken", None]["bytes"] == outcomes["org/toy", None]["bytes"]


def test_revision_argument_and_suffix_open_same_source(outcomes):
    assert outcomes["org/toy", "v1"] == outcomes["org/toy@v1", None] == outcomes["org/toy", None]


def test_offline_mode_reads_from_hub_cache(outcomes):
    assert outcomes["offline", "org/toy", None] == outcomes["org/toy", None]
    assert outcomes["offline", "org/toy", "v1"] == outcomes["org/toy", None]


@pytest.mark.parametrize(
    ("model", "message"),
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
        (("offline", "org/sharded", None), "is not complete in the local Hub cache"),
        (("org/silent", None), "RemoteProtocolError"),
        (("org/dropping", None), "RemoteProtocolError"),
    ],
)
def test_hub_failure_gives_one_line_error(outcomes, model, message):
    assert isinstance(outcomes[model], str)
    assert message in outcomes[model]
    assert "\n" not in outcomes[model]
    assert "127.0.0.1" not in outcomes[model]
