"""Uploads to the Hub: complete, private by default, and a failure is a one-line error."""

import pytest
from huggingface_hub import constants

from crosshead.model_cards.push import MESSAGE, PushError, push, tag
from crosshead_command.push import publish
from hub_client import own_hub
from hub_server import Repository

TOKEN = "hf_secretsecretsecret"
FILES = {
    "config.json": b"{}",
    "modeling_crosshead.py": b"import torch\n",
    "model-00001-of-00002.safetensors": b"first" * 100,
    "model-00002-of-00002.safetensors": b"second" * 100,
}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    for name, content in FILES.items():
        (path / name).write_bytes(content)
    return path


@pytest.fixture
def hub(monkeypatch):
    with own_hub(monkeypatch, TOKEN) as running:
        yield running


@pytest.mark.parametrize("private", [True, False])
def test_push_creates_repository_with_all_files(folder, hub, private):
    assert push(folder, "org/model", private).address == f"{hub.address}/org/model"
    repository = hub.repositories["org/model"]
    assert repository.files == FILES and repository.private == private and repository.commits == [MESSAGE]
    assert hub.tokens == {TOKEN}


def test_push_is_private_and_in_own_namespace_by_default(folder, hub):
    assert push(folder, "model").address == f"{hub.address}/me/model"
    assert hub.repositories["me/model"].private


def test_second_push_uploads_only_changes(folder, hub):
    push(folder, "org/model")
    push(folder, "org/model")
    repository = hub.repositories["org/model"]
    assert repository.commits == [MESSAGE]
    (folder / "config.json").write_bytes(b"[]")
    repository.files["README.md"] = b"written there"
    push(folder, "org/model")
    assert (
        repository.files == FILES | {"config.json": b"[]", "README.md": b"written there"}
        and len(repository.commits) == 2
    )


def test_private_push_to_public_repository_is_refused(folder, hub):
    hub.repositories["org/model"] = Repository({})
    with pytest.raises(PushError, match=r"org/model.* public"):
        push(folder, "org/model")
    assert hub.repositories["org/model"].files == {}
    push(folder, "org/model", private=False)
    assert hub.repositories["org/model"].files == FILES


def test_private_repository_stays_private(folder, hub, capsys):
    push(folder, "org/model")
    publish(folder, "org/model", private=False, files=FILES)
    assert hub.repositories["org/model"].private and "private and stays so" in capsys.readouterr().out


@pytest.mark.parametrize("step", ["create", "preupload", "batch", "commit"])
def test_refusal_by_the_hub_is_one_line_error(folder, hub, step):
    hub.repositories["org/model"] = Repository({}, private=True, refused=step)
    if step == "create":
        hub.repositories["org/model"].status = 403
    with pytest.raises(PushError) as caught:
        push(folder, "org/model")
    assert "org/model" in str(caught.value) and "403" in str(caught.value)
    assert "\n" not in str(caught.value) and TOKEN not in str(caught.value)
    assert hub.repositories["org/model"].files == {}


@pytest.mark.parametrize("step", ["create", "preupload", "batch", "stored", "commit", "validate-yaml"])
def test_transient_hub_errors_are_retried(folder, hub, step):
    hub.failing[step] = 1
    (folder / "README.md").write_text("---\nlibrary_name: transformers\n---\n")
    push(folder, "org/model")
    repository = hub.repositories["org/model"]
    assert repository.files.keys() == FILES.keys() | {"README.md"} and repository.commits == [MESSAGE]
    assert hub.failing == {step: 0}


def test_failed_push_resumes_without_uploading_again(folder, hub):
    hub.failing["commit"] = 9
    with pytest.raises(PushError, match=r"org/model.*500"):
        push(folder, "org/model")
    assert hub.repositories["org/model"].files == {} and len(hub.stored) == 2
    hub.failing.clear()
    sent = len([line for line in hub.requests if line.startswith("PUT")])
    push(folder, "org/model")
    assert hub.repositories["org/model"].files == FILES
    assert len([line for line in hub.requests if line.startswith("PUT")]) == sent == 2


def test_rejected_token_is_reported_without_retry(folder, hub):
    hub.accepted = {"hf_another"}
    with pytest.raises(PushError) as caught:
        push(folder, "org/model")
    assert all(word in str(caught.value) for word in ("org/model", "401", "`hf auth login`"))
    assert hub.repositories == {} and len([line for line in hub.requests if line.startswith("POST")]) == 1


def test_invalid_card_stops_the_push(folder, hub):
    (folder / "README.md").write_text("---\nlicense: [mit]\n---\n")
    with pytest.raises(PushError, match=r"README\.md.*license") as caught:
        push(folder, "org/model")
    assert "\n" not in str(caught.value) and hub.repositories == {}


def test_push_uploads_only_the_given_names(folder, hub):
    (folder / "[a]").mkdir()
    for name in ("later.txt", "[a]/b.txt"):
        (folder / name).write_text("")
    push(folder, "org/model", names=["config.json", "[a]/b.txt"])
    assert hub.repositories["org/model"].files.keys() == {"config.json", "[a]/b.txt"}


def test_push_deletes_weights_of_earlier_model(folder, hub):
    push(folder, "org/model")
    repository = hub.repositories["org/model"]
    repository.files |= {"model.safetensors": b"old", "adapters/model.safetensors": b"kept", "handler.py": b"kept"}
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        (folder / name).unlink()
    (folder / "model-00001-of-00001.safetensors").write_bytes(b"new")
    push(folder, "org/model")
    remaining = {"config.json", "modeling_crosshead.py", "handler.py", "adapters/model.safetensors"}
    assert repository.files.keys() == remaining | {"model-00001-of-00001.safetensors"}


def test_existing_tag_is_not_moved(folder, hub):
    pushed = push(folder, "org/model")
    repository = hub.repositories["org/model"]
    assert tag(pushed, "v1") is None
    first = repository.commit
    assert repository.tags == {"v1": first} and tag(pushed, "v1") is None
    (folder / "config.json").write_bytes(b"[]")
    pushed = push(folder, "org/model")
    assert repository.commit != first and tag(pushed, "v1") == first
    assert repository.tags == {"v1": first} and repository.at("v1")["config.json"] == b"{}"
    assert tag(pushed, "v2") is None and repository.tags["v2"] == repository.commit


def test_refused_tag_raises_push_error(folder, hub):
    pushed = push(folder, "org/model")
    hub.repositories["org/model"].refused = "/tag/"
    with pytest.raises(PushError, match=r"org/model.*403"):
        tag(pushed, "v1")


def test_push_in_offline_mode_is_refused(folder, hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PushError, match=r"org/model.*HF_HUB_OFFLINE"):
        push(folder, "org/model")


def test_unreachable_hub_raises_push_error(folder, hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(PushError, match=r"org/model.*\(.+\)"):
        push(folder, "org/model")


def test_invalid_repository_name_is_refused(folder, hub):
    with pytest.raises(PushError, match="a/b/c"):
        push(folder, "a/b/c")
