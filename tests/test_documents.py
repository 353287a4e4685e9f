"""What README and CONTRIBUTING say is true: the example runs, the options and the files they name exist."""

import re

import pytest

from crosshead import MECHANISMS
from house import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = ("README.md", "CONTRIBUTING.md")
NAMED_FILE = re.compile(r"`([\w.-]*/[\w./-]*|[\w.-]+\.(?:md|py|toml|txt))`")
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_readme_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = EXAMPLE.findall(README)
    assert examples
    for example in examples:
        exec(compile(example, "README.md", "exec"), {})
    assert (tmp_path / "my-model" / "config.json").exists()


def test_readme_lists_every_option():
    table = README.partition("| mechanism | options")[2].partition("\n\n")[0]
    rows = [re.findall(r"`(\w+)`", line) for line in table.splitlines()[2:]]
    assert {name: set(options) for name, *options in rows} == {
        name: set(mechanism.options) for name, mechanism in MECHANISMS.items()
    }


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_files_exist(document):
    names = NAMED_FILE.findall((ROOT / document).read_text(encoding="utf-8"))
    assert names
    assert [name for name in names if not (ROOT / name).exists()] == []
