"""Tokenizer files of a converted folder hold no arguments of earlier loads and load without crosshead."""

import json
import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import crosshead
from broken import config
from crosshead.common.errors import ConversionError
from crosshead.conversion.sources.model_folder import model_files, remove_loading_arguments, write_json
from toy_checkpoints import write_stock

CLEAN = """
import sys
sys.modules["crosshead"] = None
from transformers import AutoTokenizer
print(AutoTokenizer.from_pretrained(sys.argv[1], {options})("ab").input_ids)
"""


@pytest.fixture(scope="module")
def converted_folder(tmp_path_factory):
    """A conversion of a source whose tokenizer was loaded and saved again."""
    folder = tmp_path_factory.mktemp("made")
    source = write_stock(folder / "source")
    AutoTokenizer.from_pretrained(source, local_files_only=True).save_pretrained(source)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    assert settings["local_files_only"]
    settings["special_tokens_map_file"] = "elsewhere/special_tokens_map.json"
    write_json(source / "tokenizer_config.json", settings)
    crosshead.convert(source, folder / "model", {"gating": {}}, verify=False)
    return folder / "model"


def test_tokenizer_config_has_no_loading_arguments(converted_folder, tmp_path):
    settings = json.loads((converted_folder / "tokenizer_config.json").read_text())
    before = json.loads((converted_folder.parent / "source" / "tokenizer_config.json").read_text())
    assert before.pop("special_tokens_map_file") == "elsewhere/special_tokens_map.json"
    assert settings == {name: value for name, value in before.items() if name not in ("is_local", "local_files_only")}
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class":"X"}')
    remove_loading_arguments(tmp_path)
    assert (tmp_path / "tokenizer_config.json").read_text() == '{"tokenizer_class":"X"}'


def test_custom_tokenizer_code_is_neither_copied_nor_named(tmp_path):
    """The tokenizer's code is not copied, so the settings must not name it."""
    source = write_stock(tmp_path / "source")
    path = source / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"auto_map": {"AutoTokenizer": ["own_tokens.OwnTokens", None]}}
    path.write_text(json.dumps(settings))
    (source / "own_tokens.py").write_text("raise SystemExit\n")
    crosshead.convert(source, tmp_path / "model", {"gating": {}})
    assert not (tmp_path / "model" / "own_tokens.py").exists()
    loaded = AutoTokenizer.from_pretrained(tmp_path / "model", trust_remote_code=True)
    assert loaded("ab").input_ids == [1, 2]


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_tokenizer_belongs_to_the_model(file, tmp_path):
    write_json(tmp_path / file, {"auto_map": {"AutoTokenizer": [None, "own_tokens.OwnTokens"]}})
    (tmp_path / "own_tokens.py").write_text("from .own_parts import x\n")
    for name in ("own_parts.py", "run.py"):
        (tmp_path / name).write_text("x = 1\n")
    assert model_files(tmp_path) == {file, "own_tokens.py", "own_parts.py"}


def test_lone_surrogate_is_written_as_json_escape(tmp_path):
    content = {"source": "caf\udce9 \u4e16"}
    write_json(tmp_path / "x.json", content)
    written = (tmp_path / "x.json").read_text(encoding="utf-8")
    assert "caf\\udce9 \u4e16" in written and json.loads(written) == content


def test_files_of_read_only_source_are_copied_writable(tmp_path):
    source = write_stock(tmp_path / "source")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ 1 }}")
    (source / "additional_chat_templates" / "tool_use.jinja").chmod(0o444)
    (source / "additional_chat_templates").chmod(0o555)
    crosshead.convert(source, tmp_path / "model", {"gating": {}}, verify=False)
    folder = tmp_path / "model" / "additional_chat_templates"
    assert folder.stat().st_mode & 0o200 and (folder / "tool_use.jinja").stat().st_mode & 0o200
    assert (folder / "tool_use.jinja").read_text() == "{{ 1 }}"


def test_generation_settings_in_config_are_kept(tmp_path):
    """Older models have them in config.json, where transformers still reads them."""
    source = write_stock(tmp_path / "source")
    (source / "generation_config.json").unlink(missing_ok=True)
    config(repetition_penalty=1.5, max_length=9, output_scores=True)(source)
    crosshead.convert(source, tmp_path / "model", {"gating": {}}, verify=False)
    crosshead.fold(tmp_path / "model", tmp_path / "back", verify=False)
    for folder in (source, tmp_path / "model", tmp_path / "back"):
        settings = AutoModelForCausalLM.from_pretrained(folder).generation_config
        assert (settings.repetition_penalty, settings.max_length) == (1.5, 9), folder
        assert settings.output_scores and settings.return_dict_in_generate
    assert "repetition_penalty" not in json.loads((tmp_path / "model" / "config.json").read_text())
    config(num_return_sequences=3)(source)  # without sampling
    with pytest.raises(ConversionError, match=r"source cannot be used: .*num_return_sequences"):
        crosshead.convert(source, tmp_path / "model", {"gating": {}}, plan_only=True)


@pytest.mark.parametrize("name", ["LICENSE-CODE", "LICENSE-MODEL", "COPYING", "LICENSE.txt"])
def test_licences_are_copied(name, tmp_path):
    source = write_stock(tmp_path / "source")
    (source / name).write_text("terms")
    crosshead.convert(source, tmp_path / "model", {"gating": {}}, verify=False)
    assert (tmp_path / "model" / name).read_text() == "terms"


@pytest.mark.parametrize(("options", "asks"), [("trust_remote_code=False", False), ("", True)])
def test_tokenizer_loads_without_trust_remote_code(converted_folder, options, asks):
    """Without trust_remote_code, transformers asks because of the model's code, and continues without an answer."""
    command = [sys.executable, "-P", "-c", CLEAN.format(options=options), str(converted_folder)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[1, 2]\n") and ("[y/N]" in done.stdout) is asks
