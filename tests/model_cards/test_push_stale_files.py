"""A push removes the files of an earlier model from the repository and keeps the user's own files."""

import pytest

from crosshead.model_cards.push import MESSAGE, push, tag
from hub_client import own_hub
from hub_server import Repository

FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "additional_chat_templates/tool.jinja": b"tool",
}
STALE = (
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/rag.jinja",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
    "modeling_crosshead.py",
    "conversion.json",
    "training.json",
    "evaluation.json",
)
OTHERS = (
    ".gitattributes",
    "LICENSE",
    "handler.py",
    "notes.json",
    "model.fp16.safetensors",
    "model_lora.safetensors",
    "adapters/adapter_config.json",
    "lora/chat_template.jinja",
    "additional_chat_templates/notes.md",
    "onnx/tokenizer.json",
    "my_vocab.json",
)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    for name, content in FILES.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


@pytest.fixture
def hub(monkeypatch):
    with own_hub(monkeypatch, "hf_" + "planted" * 5) as running:
        yield running


def test_push_deletes_stale_model_files_and_keeps_others(folder, hub):
    existing = dict.fromkeys((*STALE, *OTHERS, *FILES), b"there before")
    repository = hub.repositories["org/model"] = Repository(existing, private=True)
    push(folder, "org/model")
    assert repository.files == FILES | dict.fromkeys(OTHERS, b"there before")
    assert repository.commits == [MESSAGE]


def test_tag_points_to_the_pushed_commit(folder, hub):
    """The tag names the pushed commit even if another one follows; the Hub is not asked for the newest commit."""
    pushed = push(folder, "org/model")
    repository = hub.repositories["org/model"]
    assert pushed.commit == repository.commit
    repository.older[repository.commit], repository.commit = dict(repository.files), "f" * 40
    request_count = len(hub.requests)
    assert tag(pushed, "v1") is None
    assert repository.tags == {"v1": pushed.commit}
    assert not [line for line in hub.requests[request_count:] if line.endswith("/api/models/org/model")]


def test_push_without_changes_returns_the_previous_commit(folder, hub):
    assert push(folder, "org/model").commit == push(folder, "org/model").commit
