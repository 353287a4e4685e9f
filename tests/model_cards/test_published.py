"""`check_folder` refuses broken or private content before anything is uploaded."""

import json
import pwd
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from broken import cut, edit_json, remove, weight_map, write
from card_toys import converted, training
from crosshead.common.access_tokens import TOKEN as PATTERN
from crosshead.common.errors import FolderError
from crosshead.model_cards import published
from crosshead_command.card import write_card
from tiers import grid
from toy_checkpoints import write_model
from toys import mixed_model

TOKEN = "hf_" + "abcdefgh" * 4
ELSEWHERE = "/".join(["", "home", "somebody"])
SECRET = "0123456789abcdef-nobodys"
check_folder = partial(published.check_folder, token=PATTERN)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A model of several shards, with its card."""
    folder = converted(tmp_path_factory.mktemp("published") / "made", verify=False)
    write_card(folder)
    return folder


@pytest.fixture
def made(whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(whole, "made"))


def metadata(text):
    """Return a function that puts `text` into the header metadata of the first shard."""

    def damage(folder):
        path = sorted(folder.glob("*.safetensors"))[0]
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        new = json.dumps(header | {"__metadata__": {"note": text}}).encode()
        path.write_bytes(len(new).to_bytes(8, "little") + new + raw[8 + length :])

    return damage


def first_shard(damage):
    """Return a function that applies `damage` to the first shard of a folder."""
    return lambda folder: damage(sorted(folder.glob("model-*.safetensors"))[0])


def misplaced(folder):
    """Make the index name the wrong shard for one tensor."""
    shards = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    other = next(shard for shard in shards.values() if shard != shards["model.norm.weight"])
    weight_map(model__norm__weight=other)(folder)


def add_card(text):
    """Return a function that appends `text` to the card."""

    def damage(folder):
        path = folder / "README.md"
        path.write_text(path.read_text() + text)

    return damage


def pickled(folder):
    """Write pickled weights under the name of a text file."""
    torch.save({"a": torch.zeros(2)}, folder / "notes.txt")


def linked(folder):
    """Add a symbolic link whose target does not exist."""
    (folder / "gone.json").symlink_to(folder / "nowhere")


def linked_folder(folder):
    """Add a symbolic link to a folder, with the name of the folder."""
    (folder.parent / "elsewhere").mkdir()
    (folder / "elsewhere").symlink_to("../elsewhere")


def test_complete_model_folder_passes(made):
    files = check_folder(made)
    assert files == {path.name: path.stat().st_size for path in made.iterdir()}
    (made / "training.json").write_text(json.dumps(training("runs/")))
    (made / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\xff")
    (made / "additional_chat_templates").mkdir()
    (made / "additional_chat_templates/tool.jinja").write_text("{{ messages }}")
    assert set(check_folder(made)) - set(files) == {
        "training.json",
        "picture.png",
        "additional_chat_templates/tool.jinja",
    }


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove("config.json"), "config.json"),
        (remove("README.md"), "`crosshead card made`"),
        (remove("tokenizer.json"), "tokenizer"),
        (remove("modeling_crosshead.py"), "modeling_crosshead.py"),
        (first_shard(Path.unlink), "model-00001-of"),
        (first_shard(lambda path: path.write_bytes(path.read_bytes()[:-1])), "model-00001-of"),
        (first_shard(lambda path: path.write_bytes(b"\x10\0\0\0\0\0\0\0[not a header!]")), "model-00001-of"),
        (first_shard(lambda path: path.write_bytes(b"\xff" * 8)), "model-00001-of"),
        (remove("model.safetensors.index.json"), "model.safetensors"),
        (weight_map(model__norm__weight="model-00001-of-00009.safetensors"), "model-00001-of-00009.safetensors"),
        (misplaced, "model.norm.weight"),
        (write("model.safetensors.index.json", "{}"), "model.safetensors.index.json"),
        (write("old.safetensors", b"\x02\0\0\0\0\0\0\0{}"), "old.safetensors"),
        (write("config.json", "{"), "made/config.json"),
        (write("training.json", "{"), "made/training.json"),
        (write("pytorch_model.bin", "text"), "pytorch_model.bin"),
        (pickled, "notes.txt"),
        (write("blob", b"\xff\xfe\xfd"), "blob"),
        (write(".env", "A=1"), ".env"),
        (linked, "broken link gone.json"),
        (linked_folder, "link to a folder elsewhere"),
        (write("README.md", "# Without a head\n"), "library_name"),
        (write("README.md", "---\nlibrary_name: [\n---\n"), "made/README.md"),
        (
            write("README.md", "---\nlibrary_name: transformers\nmodel-index:\n- name: x\n---\n"),
            "made/README.md",
        ),
        (add_card(f"\nTrained in {ELSEWHERE}/runs.\n"), repr(ELSEWHERE)),
        (add_card("\nC:\\\\Users\\me\\x\n"), "README.md"),
        (write("note.json", json.dumps({"a": ["/stores/me/run"]})), "'/stores/me/run'"),
        (metadata(f"from {ELSEWHERE}/runs"), repr(ELSEWHERE)),
        (metadata("/stores/me/run"), "'/stores/me/run'"),
    ],
)
def test_damaged_or_private_folder_is_refused(made, damage, words):
    damage(made)
    with pytest.raises(FolderError) as caught:
        check_folder(made)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("place", "around"),
    grid(
        [
            *("lustre/me", "lustre9/me", "gpfs/me", "nfs/me", "raid/me", "fsx/me", "nvme0/me", "kaggle/working"),
            *("content/drive", "workspace/me", "mnt/me", "scratch/me", "Users/me", "Volumes/me"),
        ],
        ["Trained in {}/run.", "`{}`", "file://{}", '{{"a": "at {} it was"}}'],
        strength=1,
    ),
)
def test_machine_paths_are_refused(made, place, around):
    (made / "note.md").write_text(around.format(f"/{place}"))
    with pytest.raises(FolderError, match=rf"note\.md.*{place}"):
        check_folder(made)


@pytest.mark.parametrize("place", ["C:\\Users\\me", "D:\\runs\\a", "C:/Users/me"])
def test_windows_paths_are_refused(made, place):
    (made / "note.md").write_text(f"Trained in {place}.")
    with pytest.raises(FolderError, match=r"note\.md"):
        check_folder(made)


def test_urls_and_fractions_are_not_taken_for_paths(made):
    sites = ("https://example.org/{}/x", "http://localhost:80/{}/x", "example.org/{}/x", "{{place}}/{}/x", "../{}/x")
    roots = ("home", "content", "data", "lustre", "nfs", "raid", "workspace", "kaggle", "tmp")
    (made / "note.md").write_text("\n".join(site.format(root) for site in sites for root in roots))
    (made / "more.md").write_text("and/or, 1/2, s/home/b/, [x](/datasets/a/b), #!/usr/bin/env, a: b, http://c:/d")
    assert {"note.md", "more.md"} <= check_folder(made).keys()


@pytest.mark.parametrize(
    ("secret", "before", "place"),
    grid(
        [TOKEN, SECRET, "-----BEGIN OPENSSH PRIVATE KEY-----", "ghp_" + "a1" * 18],
        ["key: ", "of\nlines\n"],
        ["note.txt", "config.json", "card", "weights"],
    ),
)
def test_secrets_are_refused_and_not_printed(made, secret, before, place, monkeypatch):
    monkeypatch.setenv("TRACKER_API_KEY", SECRET)
    monkeypatch.setenv("HF_TOKEN", "another-token-of-the-hub")
    places = {"card": add_card, "weights": metadata, "note.txt": lambda text: write("note.txt", text)}
    places["config.json"] = lambda text: lambda folder: edit_json(folder, "config.json", note=text)
    places[place](f"{before}{secret}")(made)
    with pytest.raises(FolderError, match="token") as caught:
        check_folder(made)
    assert secret not in str(caught.value)


@pytest.mark.parametrize("name", ["org/llama-sk-instruct-finetuned-2024", "runs/sk-learning-rate-sweep-of-2026"])
def test_model_names_are_not_taken_for_tokens(made, name):
    edit_json(made, "generation_config.json", note=name)
    assert check_folder(made)


@pytest.mark.parametrize("token", ["sk-" + "a1B2" * 12, "sk-proj-" + "aB_1-" * 9, "sk-ant-api03-" + "x-Y_9" * 9])
def test_api_keys_are_refused(made, token):
    edit_json(made, "generation_config.json", note=token)
    with pytest.raises(FolderError, match="token"):
        check_folder(made)


def test_hub_token_of_the_environment_is_refused(made, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a token that looks like none")
    edit_json(made, "generation_config.json", note="it is a token that looks like none!")
    with pytest.raises(FolderError, match=r"generation_config\.json.*token"):
        check_folder(made)


def test_path_of_the_containing_folder_is_refused(made, monkeypatch):
    deep = Path("one/two").resolve()
    deep.mkdir(parents=True)
    moved = Path(shutil.move(made, deep / "made"))
    edit_json(moved, "generation_config.json", note=f"from {deep}")
    with pytest.raises(FolderError, match=r"generation_config\.json"):
        check_folder(moved)


def test_vocabulary_words_are_not_taken_for_paths(made):
    path = made / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["/usr/local"] = 60
    content["model"]["vocab"][ELSEWHERE] = 60
    path.write_text(json.dumps(content))
    assert "tokenizer.json" in check_folder(made)


def test_truncated_single_weight_file_is_refused(tmp_path):
    folder = write_model(mixed_model("Qwen3", {"talking": {}}), tmp_path / "made")
    write_card(folder)
    assert "model.safetensors" in check_folder(folder)
    cut("model.safetensors", -1)(folder)
    with pytest.raises(FolderError, match=r"model\.safetensors"):
        check_folder(folder)


def test_user_without_home_directory(made, monkeypatch):
    def unknown(user):
        raise KeyError(f"uid not found: {user}")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert "config.json" in check_folder(made)
