"""Untrusted model folders: their code does not run; private files and tokens are neither copied nor published."""

import json
import shutil
from types import SimpleNamespace

import pytest

import crosshead
from broken import edit_json, run
from crosshead.common.access_tokens import TOKEN
from crosshead.common.atomic_write import write_atomically
from crosshead.common.errors import ConversionError, EvalError, FolderError, RecipeError, one_line
from crosshead.common.yaml_text import parse_yaml
from crosshead.conversion.convert import _save_calibration
from crosshead.conversion.sources.model_folder import write_json
from crosshead.conversion.verification.tolerances import Tolerance, recorded_tolerance
from crosshead.model_cards.card import card_text
from crosshead.model_cards.facts import read_facts
from crosshead.model_cards.published import check_folder
from crosshead.recipes.trainer.loading import load_tokenizer
from crosshead_command.card import write_card
from crosshead_command.main import complain
from toy_checkpoints import write_stock

SECRET = "hf_" + "a1B2" * 6


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    workspace = tmp_path_factory.mktemp("folders")
    write_stock(workspace / "source")
    crosshead.convert(workspace / "source", workspace / "made", {"knocking": {}}, verify=False)
    write_card(workspace / "made")
    return workspace


@pytest.fixture
def workspace(folders, tmp_path, monkeypatch):
    """Folder with copies of a stock and a converted model, and with code that writes the file `ran` when it runs."""
    for name in ("source", "made"):
        shutil.copytree(folders / name, tmp_path / name)
    (tmp_path / "elsewhere").mkdir()
    for name in ("configuration_crosshead.py", "modeling_crosshead.py"):
        text = (folders / "made" / name).read_text()
        (tmp_path / "elsewhere" / name).write_text(text + f"\nopen({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def other_code(workspace):
    config = json.loads((workspace / "made/config.json").read_text())
    mapped = {name: f"{workspace / 'elsewhere'}--{value}" for name, value in config["auto_map"].items()}
    edit_json(workspace / "made", "config.json", auto_map=mapped)


def tokenizer_code(workspace):
    (workspace / "made/tok.py").write_text(f"open({str(workspace / 'ran')!r}, 'w')\n")
    edit_json(
        workspace / "made", "tokenizer_config.json", auto_map={"AutoTokenizer": ["tok.T", None]}, tokenizer_class="T"
    )


def linked_code(workspace):
    """Add code that `generate` runs, in a linked folder."""
    (workspace / "elsewhere/custom_generate").mkdir()
    (workspace / "elsewhere/custom_generate/generate.py").write_text(f"open({str(workspace / 'ran')!r}, 'w')\n")
    (workspace / "made/custom_generate").symlink_to(workspace / "elsewhere/custom_generate")


def code_of_other_repository(workspace):
    mapped = {"AutoTokenizer": ["configuration_crosshead.x/other--tok.T", None]}
    edit_json(workspace / "made", "tokenizer_config.json", auto_map=mapped)


REFUSALS = {
    other_code: ("--trust-remote-code", "of this machine"),
    tokenizer_code: ("tok.py", "--trust-remote-code"),
    linked_code: ("the linked folder custom_generate", "link to a folder custom_generate"),
    code_of_other_repository: ("other--tok.T", "--trust-remote-code"),
}


@pytest.mark.parametrize("damage", REFUSALS)
@pytest.mark.parametrize("command", ["verify source made", "push made me/x --dry-run"])
def test_remote_code_of_model_folder_does_not_run(damage, command, workspace, capfd, monkeypatch):
    damage(workspace)
    status, _, err = run(capfd, monkeypatch, command)
    assert status == 1 and err.count("\n") == 1 and not (workspace / "ran").exists()
    assert any(words in err for words in REFUSALS[damage]), err


@pytest.mark.parametrize("name", ["tokenizer.model", "LICENSE", "1_Pooling/config.json"])
def test_symlinks_to_other_files_are_refused(name, workspace):
    (workspace / "private").write_text("{}")
    (workspace / "source/1_Pooling").mkdir()
    (workspace / "source" / name).symlink_to(workspace / "private")
    with pytest.raises(ConversionError, match="is a link to"):
        crosshead.convert(workspace / "source", workspace / "out", {"gating": {}}, verify=False)
    assert not (workspace / "out").exists()


def test_symlink_to_file_of_the_same_name_is_copied(workspace):
    shutil.move(workspace / "source/tokenizer.json", workspace / "tokenizer.json")
    (workspace / "source/tokenizer.json").symlink_to("../tokenizer.json")
    crosshead.convert(workspace / "source", workspace / "out", {"gating": {}}, verify=False)
    assert not (workspace / "out/tokenizer.json").is_symlink()


def test_nested_folder_in_model_folder_is_refused(workspace):
    (workspace / "source/1_Pooling/keys.json").mkdir(parents=True)
    with pytest.raises(ConversionError, match="1_Pooling"):
        crosshead.convert(workspace / "source", workspace / "out", {"gating": {}}, verify=False)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.model", b"\x00\x01" + SECRET.encode()),
        ("logo.png", SECRET.encode()),
        ("scaler.sav", b'cos\nsystem\n(S"id"\ntR.'),
        ("sub/x.safetensors", (2**40).to_bytes(8, "little") + b"{}"),
        ("notes.txt", None),
    ],
)
def test_private_or_unsafe_files_are_not_published(name, content, workspace):
    (workspace / "made" / name).parent.mkdir(exist_ok=True)
    if content is None:
        (workspace / "private").write_text("mine")
        (workspace / "made" / name).symlink_to(workspace / "private")
    else:
        (workspace / "made" / name).write_bytes(content)
    with pytest.raises(FolderError, match=name.split("/")[-1]):
        check_folder(workspace / "made", TOKEN)


def test_writes_do_not_follow_planted_symlinks(workspace):
    private = workspace / "private"
    private.write_text("mine")
    for name in (".conversion.json.partial", ".README.md.partial", ".kept.safetensors.partial"):
        (workspace / "made" / name).symlink_to(private)
    write_json(workspace / "made/conversion.json", {})
    write_atomically({workspace / "made/README.md": "text"})
    _save_calibration(workspace / "source/model.safetensors", workspace / "made/kept.safetensors")
    assert private.read_text() == "mine" and not (workspace / "made/kept.safetensors").is_symlink()
    (workspace / "made/report.md").symlink_to(workspace / "not there")
    with pytest.raises(EvalError, match=r"report\.md is a broken link"):
        write_atomically({workspace / "made/report.md": "text"})


def test_token_pattern_matches_variants_of_hub_tokens():
    for text in (
        "hf_oauth_eyJhbGciOiJ.eyJzY29wZSI.abcdefgh",
        "hf_jwt_eyJhbGciOiJSUzI1NiJ9",
        f"%3A{SECRET}",
        f"x_{SECRET}",
    ):
        assert TOKEN.search(f'"{text}"'), text
    assert not TOKEN.search(f"shelf{SECRET}")


def test_nested_yaml_aliases_are_limited():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    with pytest.raises(ValueError, match="100,000"):
        parse_yaml("\n".join(lines))


def test_messages_hide_passwords_and_escape_codes(capsys):
    assert one_line(OSError("no answer of http://me:word@host:9/x")) == "no answer of http://host:9/x"
    assert one_line(OSError("403 for 'https://host/x?Signature=a%2Fb&Policy=c' (x)")) == "403 for 'https://host/x' (x)"
    assert one_line(OSError("no url: /x?name=UTF-8''a;&Signature=b, retry")) == "no url: /x, retry"
    complain("model_type '\x1b[31mllama'", 1)
    assert capsys.readouterr().err == "crosshead: model_type '\\x1b[31mllama'\n"


def test_record_values_cannot_inject_markup_into_a_card(workspace):
    record = json.loads((workspace / "made/conversion.json").read_text())
    record["source"] = {"kind": "folder", "name": "x`\n```\n\n<script>alert(1)</script>"}
    (workspace / "made/conversion.json").write_text(json.dumps(record))
    recipe = {"output": 'a/x"); import os #', "hub": {"repo": "k\n```\n# heading"}, "model": {"path": "x"}}
    (workspace / "model").mkdir()
    for path in (workspace / "made").iterdir():
        shutil.copy(path, workspace / "model")
    (workspace / "model/training.json").write_text(json.dumps({"recipe": recipe}))
    text = card_text(read_facts(workspace / "model", ()))
    outside, fence = [], ""
    for line in text.splitlines():
        marks = line[: len(line) - len(line.lstrip("`"))]
        if len(marks) >= 3 and (not fence or marks == fence):
            fence = "" if fence else marks
        elif not fence:
            outside.append(line)
    assert not [line for line in outside if "<script>" in line or line.startswith("# heading")]
    assert not [line for line in text.splitlines() if "from_pretrained(" in line and '");' in line]
    assert not fence


@pytest.mark.parametrize(
    "command",
    [["inspect", "source", "--text", "a b c", "--out", "x.html"], "eval source --suite offline --out x.json"],
)
def test_absurd_layer_count_is_refused(command, workspace, capfd, monkeypatch):
    edit_json(workspace / "source", "config.json", num_hidden_layers=100_000_000)
    status, _, err = run(capfd, monkeypatch, command)
    assert status == 1 and "num_hidden_layers=100000000" in err


def test_recorded_tolerance_is_capped():
    tolerance = recorded_tolerance({"logits": 1e9, "divergence": 1e9})
    assert (tolerance.logits, tolerance.divergence) == (0.1, 0.01)
    assert recorded_tolerance({"logits": None, "divergence": 1e-5}) == Tolerance(None, 1e-5)


def test_chat_template_named_by_a_path_is_refused(workspace):
    templates = [{"name": "default", "template": "{{ 1 }}"}, {"name": "../../dropped", "template": "{{ 2 }}"}]
    edit_json(workspace / "source", "tokenizer_config.json", chat_template=templates)
    options = SimpleNamespace(tokenizer=None, path=str(workspace / "source"))
    with pytest.raises(RecipeError, match=r"dropped"):
        load_tokenizer(SimpleNamespace(model=options))
