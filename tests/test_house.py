"""The house keeps its own rules: every rule over every file, and every rule caught breaking."""

import tomllib
from graphlib import TopologicalSorter

import pytest

import house
from house import ROOT, Source

PYTHON_RULES = [
    house.arrows,
    house.portable,
    house.lazy,
    house.file_length,
    house.function_length,
    house.no_assert,
    house.no_print,
    house.docstrings,
    house.annotations,
]
FILES = [path.relative_to(ROOT).as_posix() for path in house.project_files()]
OURS = [path for path in FILES if path.endswith(".py") and path.split("/")[0] in (*house.FOLDERS, "tests")]
TABLES = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]

BROKEN = [
    (house.arrows, "modeling/a.py", "import crosshead"),
    (house.arrows, "modeling/a.py", "def f():\n    from crosshead.evals import cost"),
    (house.arrows, "modeling/a.py", "from ..conversion import convert"),
    (house.arrows, "conversion/a.py", "from crosshead.recipes.train import train"),
    (house.arrows, "conversion/a.py", "from ..recipes import train"),
    (house.arrows, "conversion/a.py", "from .. import recipes"),
    (house.arrows, "conversion/a.py", "from crosshead import evals"),
    (house.arrows, "evals/a.py", "import crosshead.recipes.train as train"),
    (house.arrows, "evals/a.py", "from crosshead import __version__"),
    (house.arrows, "recipes/a.py", "from crosshead.conversion import convert"),
    (house.arrows, "model_cards/a.py", "from crosshead.modeling.mechanisms.base import HeadMixer"),
    (house.arrows, "recipes/a.py", "import modeling"),
    (house.arrows, "crosshead/common/a.py", "import crosshead"),
    (house.arrows, "crosshead/common/a.py", "from ..modeling import mixer"),
    (house.arrows, "modeling/a.py", "from crosshead.common.b import c"),
    (house.portable, "modeling/a.py", "import numpy as np"),
    (house.portable, "modeling/a.py", "try:\n    import einops\nexcept ImportError:\n    pass"),
    (house.portable, "modeling/a.py", "from crosshead.modeling.b import c"),
    (house.portable, "modeling/a.py", "from . import b"),
    (house.portable, "modeling/mechanisms/a.py", "from .. import b"),
    (house.portable, "modeling/a.py", "from .kernels import b"),
    (house.portable, "modeling/mechanisms/a.py", "def f():\n    from ..kernels.b import c"),
    (house.portable, "modeling/kernels/a.py", "import numpy"),
    (house.portable, "modeling/a.py", "try:\n    import triton\nexcept ImportError:\n    raise"),
    (house.portable, "modeling/a_triton.py", "import triton.language as tl"),
    (house.portable, "modeling/a.py", "from .b_triton import c"),
    (house.lazy, "recipes/a.py", "import datasets"),
    (house.lazy, "recipes/a.py", "try:\n    from peft import LoraConfig\nexcept ImportError:\n    LoraConfig = None"),
    (house.lazy, "evals/a.py", "class A:\n    import lm_eval.api"),
    (house.lazy, "crosshead/a.py", "if True:\n    import accelerate"),
    (house.file_length, "evals/a.py", "x = 1\n" * 301),
    (house.file_length, "tests/a.py", "x = 1\n" * 301),
    (house.function_length, "evals/a.py", "def f():\n" + "    x = 1\n" * 60),
    (house.function_length, "evals/a.py", "class A:\n    async def f(self):\n" + "        x = 1\n" * 60),
    (house.no_assert, "evals/a.py", "def f(x):\n    assert x"),
    (house.no_assert, "crosshead/cli.py", "assert True"),
    (house.no_print, "evals/a.py", "def f(x):\n    print(x)"),
    (house.docstrings, "evals/a.py", "x = 1"),
    (house.docstrings, "evals/a.py", '"""Module."""\ndef f(): ...'),
    (house.docstrings, "evals/a.py", '"""Module."""\nclass A: ...'),
    (house.docstrings, "evals/a.py", '"""Module."""\nclass A:\n    """A."""\n    def f(self): ...'),
    (house.annotations, "evals/a.py", "def f(x) -> None: ..."),
    (house.annotations, "evals/a.py", "def f(x: int): ..."),
    (house.annotations, "evals/a.py", "def f(*, x) -> None: ..."),
    (house.annotations, "evals/a.py", "def f(**kwargs) -> None: ..."),
    (house.annotations, "evals/a.py", "class A:\n    def f(self, x) -> None: ..."),
    (house.machine_paths, "README.md", "see " + "/" + "home/somebody/model"),
    (house.machine_paths, "evals/a.py", 'PATH = "' + "/" + 'tmp/model"'),
]
FINE = [
    (
        house.arrows,
        "conversion/a.py",
        "from crosshead.modeling.mechanisms.base import HeadMixer\nfrom ..modeling import mixer",
    ),
    (house.arrows, "recipes/a.py", "from crosshead.evals import cost\nfrom .schema import Recipe\nimport torch"),
    (house.arrows, "crosshead/cli.py", "from crosshead.recipes import train\nfrom .modeling import mixer"),
    (house.arrows, "tests/a.py", "from crosshead.recipes import train"),
    (house.arrows, "model_cards/a.py", "from crosshead.common.b import c"),
    (
        house.arrows,
        "crosshead/common/a.py",
        "from .b import c\nfrom crosshead.common.b import d\nfrom ..common import b",
    ),
    (house.portable, "modeling/a.py", "import math\nimport torch.nn.functional as F\nfrom .b import (\n    c,\n)"),
    (house.portable, "modeling/kernels/a.py", "from ..mechanisms.b import c\nfrom . import d"),
    (house.portable, "modeling/mechanisms/a.py", "import torch\nfrom ..b import c\nfrom .d import e"),
    (house.portable, "modeling/a.py", "def f():\n    from .b_triton import c"),
    (house.portable, "modeling/a_triton.py", "try:\n    import triton\nexcept ImportError:\n    raise"),
    (house.portable, "modeling/a_triton.py", "from .b_triton import c"),
    (house.lazy, "recipes/a.py", "def f():\n    import datasets"),
    (house.lazy, "recipes/a.py", "if TYPE_CHECKING:\n    from datasets import Dataset"),
    (house.file_length, "evals/a.py", "x = 1\n" * 300),
    (house.function_length, "evals/a.py", "def f():\n" + "    x = 1\n" * 59),
    (house.function_length, "tests/a.py", "def f():\n" + "    x = 1\n" * 60),
    (house.no_assert, "tests/a.py", "assert True"),
    (house.no_print, "crosshead/cli.py", "print(1)"),
    (house.no_print, "evals/a.py", "def f(x):\n    x.print()"),
    (house.docstrings, "evals/a.py", '"""Module."""\ndef _f(): ...'),
    (house.docstrings, "evals/a.py", '"""Module."""\nclass A:\n    """A."""\n    def __init__(self): ...'),
    (house.annotations, "evals/a.py", "def _f(x): ..."),
    (house.annotations, "evals/a.py", "class A:\n    @classmethod\n    def f(cls, *x: int) -> int: ..."),
    (house.machine_paths, "README.md", "https://example.org/" + "home/x and a/" + "tmp/x and {root}/" + "work"),
]


each_rule = pytest.mark.parametrize("rule", [*PYTHON_RULES, house.machine_paths], ids=lambda rule: rule.__name__)


@pytest.fixture(scope="module")
def sources():
    return {path: house.read(ROOT / path) for path in FILES}


@pytest.mark.parametrize("rule", PYTHON_RULES, ids=lambda rule: rule.__name__)
def test_files_keep_rule(rule, sources):
    found = {path: rule(sources[path]) for path in OURS}
    assert {path: said for path, said in found.items() if said} == {}, rule.__doc__


def test_files_name_no_machine(sources):
    found = {path: house.machine_paths(source) for path, source in sources.items()}
    assert {path: said for path, said in found.items() if said} == {}


@each_rule
def test_rule_catches(rule):
    missed = [(path, text) for each, path, text in BROKEN if each is rule and not rule(Source(path, text))]
    assert missed == []


@each_rule
def test_rule_lets_pass(rule):
    caught = [(path, text) for each, path, text in FINE if each is rule and rule(Source(path, text))]
    assert caught == []


def test_every_rule_is_seen_breaking():
    assert {case[0] for case in BROKEN} == {case[0] for case in FINE} == {*PYTHON_RULES, house.machine_paths}


def test_rules_see_every_python_file():
    roots = {path.split("/")[0] for path in FILES if path.endswith(".py")}
    assert roots == {*house.FOLDERS, "tests"}, "a root folder with code needs a place in house.FOLDERS"


def test_no_import_cycles(sources):
    ours = [source for path, source in sources.items() if path in OURS and not source.is_test]
    modules = {house.module_of(source) for source in ours}
    graph = {house.module_of(source): house.imported_modules(source, modules) for source in ours}
    assert graph["recipes.train"] >= {"recipes.trainer.run_trainer", "crosshead.common.errors"}
    assert list(TopologicalSorter(graph).static_order())  # or CycleError


def test_every_folder_is_packaged():
    folders = {path.rpartition("/")[0] for path in FILES if path.endswith("/__init__.py")}
    names = {each: "crosshead" if each == "crosshead" else f"crosshead.{each.replace('/', '.')}" for each in folders}
    installed = {name: folder for folder, name in names.items() if folder.split("/")[0] in house.FOLDERS[1:]}
    installed |= {"crosshead": "crosshead", "crosshead_command": "crosshead/command"}
    assert TABLES["package-dir"] == installed
    assert set(TABLES["packages"]) == set(installed) | {"crosshead.common", "crosshead.demo"}  # at their own places


@pytest.mark.parametrize("folder", house.FOLDERS)
def test_folder_is_a_typed_package(folder):
    assert f"{folder}/__init__.py" in FILES
    assert f"{folder}/py.typed" in FILES


def test_no_test_folder_hides_the_package():
    # tests/ is on sys.path for its helpers, and a folder there comes before the editable install.
    assert not (ROOT / "tests" / "crosshead").exists()
