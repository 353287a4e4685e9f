"""The tokenizer of a converted folder: it says nothing of who loaded it before, and needs none of our code."""

import json
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

import crosshead
from crosshead.conversion.sources.model_folder import forget_loading
from toy_checkpoints import write_stock

CLEAN = """
import sys
sys.modules["crosshead"] = None
from transformers import AutoTokenizer
print(AutoTokenizer.from_pretrained(sys.argv[1], {options})("ab").input_ids)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """From a source whose tokenizer was loaded and saved again."""
    place = tmp_path_factory.mktemp("made")
    source = write_stock(place / "source")
    AutoTokenizer.from_pretrained(source, local_files_only=True).save_pretrained(source)
    assert json.loads((source / "tokenizer_config.json").read_text())["local_files_only"]
    crosshead.convert(source, place / "model", {"gating": {}}, verify=False)
    return place / "model"


def test_settings_say_nothing_of_the_loader(made, tmp_path):
    said = json.loads((made / "tokenizer_config.json").read_text())
    before = json.loads((made.parent / "source" / "tokenizer_config.json").read_text())
    assert said == {name: value for name, value in before.items() if name not in ("is_local", "local_files_only")}
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class":"X"}')
    forget_loading(tmp_path)
    assert (tmp_path / "tokenizer_config.json").read_text() == '{"tokenizer_class":"X"}'


@pytest.mark.parametrize(("options", "asks"), [("trust_remote_code=False", False), ("", True)])
def test_it_loads_where_nobody_trusts_the_code(made, options, asks):
    """Without a word on trust, transformers asks because of the model's code, and goes on where nobody answers."""
    command = [sys.executable, "-P", "-c", CLEAN.format(options=options), str(made)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[1, 2]\n") and ("[y/N]" in done.stdout) is asks
