"""Every rule of the code base holds in every file, and each rule detects a snippet that breaks it."""

import re
import tomllib
from graphlib import TopologicalSorter

import pytest

import crosshead
import rules
from rules import ROOT, Source

PYTHON_RULES = [
    rules.arrows,
    rules.portable,
    rules.lazy,
    rules.file_length,
    rules.function_length,
    rules.no_assert,
    rules.no_print,
    rules.docstrings,
    rules.annotations,
]
FILES = [path.relative_to(ROOT).as_posix() for path in rules.project_files()]
OURS = [path for path in FILES if path.endswith(".py") and path.split("/")[0] in (*rules.FOLDERS, "tests")]
TABLES = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]

BROKEN = [
    (rules.arrows, "modeling/a.py", "import crosshead"),
    (rules.arrows, "modeling/a.py", "def f():\n    from crosshead.evals import cost"),
    (rules.arrows, "modeling/a.py", "from ..conversion import convert"),
    (rules.arrows, "conversion/a.py", "from crosshead.recipes.train import train"),
    (rules.arrows, "conversion/a.py", "from ..recipes import train"),
    (rules.arrows, "conversion/a.py", "from .. import recipes"),
    (rules.arrows, "conversion/a.py", "from crosshead import evals"),
    (rules.arrows, "evals/a.py", "import crosshead.recipes.train as train"),
    (rules.arrows, "evals/a.py", "from crosshead import __version__"),
    (rules.arrows, "recipes/a.py", "from crosshead.conversion import convert"),
    (rules.arrows, "model_cards/a.py", "from crosshead.modeling.mechanisms.base import HeadMixer"),
    (rules.arrows, "recipes/a.py", "import modeling"),
    (rules.arrows, "crosshead/common/a.py", "import crosshead"),
    (rules.arrows, "crosshead/common/a.py", "from ..modeling import mixer"),
    (rules.arrows, "modeling/a.py", "from crosshead.common.b import c"),
    (rules.portable, "modeling/a.py", "import numpy as np"),
    (rules.portable, "modeling/a.py", "try:\n    import einops\nexcept ImportError:\n    pass"),
    (rules.portable, "modeling/a.py", "from crosshead.modeling.b import c"),
    (rules.portable, "modeling/a.py", "from . import b"),
    (rules.portable, "modeling/mechanisms/a.py", "from .. import b"),
    (rules.portable, "modeling/a.py", "from .kernels import b"),
    (rules.portable, "modeling/mechanisms/a.py", "def f():\n    from ..kernels.b import c"),
    (rules.portable, "modeling/kernels/a.py", "import numpy"),
    (rules.portable, "modeling/a.py", "try:\n    import triton\nexcept ImportError:\n    raise"),
    (rules.portable, "modeling/a_triton.py", "import triton.language as tl"),
    (rules.portable, "modeling/a.py", "from .b_triton import c"),
    (rules.lazy, "recipes/a.py", "import datasets"),
    (rules.lazy, "recipes/a.py", "try:\n    from peft import LoraConfig\nexcept ImportError:\n    LoraConfig = None"),
    (rules.lazy, "evals/a.py", "class A:\n    import lm_eval.api"),
    (rules.lazy, "crosshead/a.py", "if True:\n    import accelerate"),
    (rules.lazy, "modeling/a.py", "import diffusers"),
    (rules.lazy, "modeling/dit.py", "import datasets"),
    (rules.lazy, "crosshead/__init__.py", "from crosshead.modeling.dit import CrossheadDiTTransformer2DModel"),
    (rules.lazy, "modeling/__init__.py", "from .dit import CrossheadDiTTransformer2DModel"),
    (rules.portable, "modeling/a.py", "import diffusers"),
    (rules.file_length, "evals/a.py", "x = 1\n" * 301),
    (rules.file_length, "tests/a.py", "x = 1\n" * 301),
    (rules.function_length, "evals/a.py", "def f():\n" + "    x = 1\n" * 60),
    (rules.function_length, "evals/a.py", "class A:\n    async def f(self):\n" + "        x = 1\n" * 60),
    (rules.no_assert, "evals/a.py", "def f(x):\n    assert x"),
    (rules.no_assert, "crosshead/cli.py", "assert True"),
    (rules.no_print, "evals/a.py", "def f(x):\n    print(x)"),
    (rules.docstrings, "evals/a.py", "x = 1"),
    (rules.docstrings, "evals/a.py", '"""Module."""\ndef f(): ...'),
    (rules.docstrings, "evals/a.py", '"""Module."""\nclass A: ...'),
    (rules.docstrings, "evals/a.py", '"""Module."""\nclass A:\n    """A."""\n    def f(self): ...'),
    (rules.annotations, "evals/a.py", "def f(x) -> None: ..."),
    (rules.annotations, "evals/a.py", "def f(x: int): ..."),
    (rules.annotations, "evals/a.py", "def f(*, x) -> None: ..."),
    (rules.annotations, "evals/a.py", "def f(**kwargs) -> None: ..."),
    (rules.annotations, "evals/a.py", "class A:\n    def f(self, x) -> None: ..."),
    (rules.machine_paths, "README.md", "see " + "/" + "home/somebody/model"),
    (rules.machine_paths, "evals/a.py", 'PATH = "' + "/" + 'tmp/model"'),
]
FINE = [
    (
        rules.arrows,
        "conversion/a.py",
        "from crosshead.modeling.mechanisms.base import HeadMixer\nfrom ..modeling import mixer",
    ),
    (rules.arrows, "recipes/a.py", "from crosshead.evals import cost\nfrom .schema import Recipe\nimport torch"),
    (rules.arrows, "crosshead/cli.py", "from crosshead.recipes import train\nfrom .modeling import mixer"),
    (rules.arrows, "tests/a.py", "from crosshead.recipes import train"),
    (rules.arrows, "model_cards/a.py", "from crosshead.common.b import c"),
    (
        rules.arrows,
        "crosshead/common/a.py",
        "from .b import c\nfrom crosshead.common.b import d\nfrom ..common import b",
    ),
    (rules.portable, "modeling/a.py", "import math\nimport torch.nn.functional as F\nfrom .b import (\n    c,\n)"),
    (rules.portable, "modeling/kernels/a.py", "from ..mechanisms.b import c\nfrom . import d"),
    (rules.portable, "modeling/mechanisms/a.py", "import torch\nfrom ..b import c\nfrom .d import e"),
    (rules.portable, "modeling/a.py", "def f():\n    from .b_triton import c"),
    (rules.portable, "modeling/a_triton.py", "try:\n    import triton\nexcept ImportError:\n    raise"),
    (rules.portable, "modeling/a_triton.py", "from .b_triton import c"),
    (rules.lazy, "recipes/a.py", "def f():\n    import datasets"),
    (rules.lazy, "recipes/a.py", "if TYPE_CHECKING:\n    from datasets import Dataset"),
    (rules.lazy, "modeling/dit.py", "import diffusers"),
    (rules.lazy, "crosshead/a.py", "def f():\n    from crosshead.modeling.dit import CODE"),
    (rules.portable, "modeling/dit.py", "from diffusers import ConfigMixin"),
    (rules.file_length, "evals/a.py", "x = 1\n" * 300),
    (rules.function_length, "evals/a.py", "def f():\n" + "    x = 1\n" * 59),
    (rules.function_length, "tests/a.py", "def f():\n" + "    x = 1\n" * 60),
    (rules.no_assert, "tests/a.py", "assert True"),
    (rules.no_print, "crosshead/cli.py", "print(1)"),
    (rules.no_print, "evals/a.py", "def f(x):\n    x.print()"),
    (rules.docstrings, "evals/a.py", '"""Module."""\ndef _f(): ...'),
    (rules.docstrings, "evals/a.py", '"""Module."""\nclass A:\n    """A."""\n    def __init__(self): ...'),
    (rules.annotations, "evals/a.py", "def _f(x): ..."),
    (rules.annotations, "evals/a.py", "class A:\n    @classmethod\n    def f(cls, *x: int) -> int: ..."),
    (rules.machine_paths, "README.md", "https://example.org/" + "home/x and a/" + "tmp/x and {root}/" + "work"),
]


each_rule = pytest.mark.parametrize("rule", [*PYTHON_RULES, rules.machine_paths], ids=lambda rule: rule.__name__)


@pytest.fixture(scope="module")
def sources():
    return {path: rules.read(ROOT / path) for path in FILES}


def test_mechanisms_and_attention_name_no_backbone(sources):
    families = {config.class_prefix.removeprefix("Crosshead").lower() for config in crosshead.FAMILIES} | {"dit"}
    shared = "transformers.models.llama.modeling_llama import apply_rotary_pos_emb"  # its place in transformers
    named = re.compile(rf"\b({'|'.join(families)})(\d|_\w+)?\b")
    common = {f"modeling/{name}.py" for name in ("attention", "backends", "cache", "ops")}
    files = [path for path in sources if path in common or path.startswith("modeling/mechanisms/")]
    assert len(files) > 8
    for path in files:
        assert not named.search(sources[path].text.replace(shared, "").lower()), path


@pytest.mark.parametrize("rule", PYTHON_RULES, ids=lambda rule: rule.__name__)
def test_files_follow_rule(rule, sources):
    violations = {path: rule(sources[path]) for path in OURS}
    assert {path: lines for path, lines in violations.items() if lines} == {}, rule.__doc__


def test_files_contain_no_machine_paths(sources):
    violations = {path: rules.machine_paths(source) for path, source in sources.items()}
    assert {path: lines for path, lines in violations.items() if lines} == {}


@each_rule
def test_rule_detects_violations(rule):
    missed = [(path, text) for case_rule, path, text in BROKEN if case_rule is rule and not rule(Source(path, text))]
    assert missed == []


@each_rule
def test_rule_accepts_valid_code(rule):
    caught = [(path, text) for case_rule, path, text in FINE if case_rule is rule and rule(Source(path, text))]
    assert caught == []


def test_every_rule_has_broken_and_valid_examples():
    assert {case[0] for case in BROKEN} == {case[0] for case in FINE} == {*PYTHON_RULES, rules.machine_paths}


def test_rules_cover_every_folder_with_python_files():
    roots = {path.split("/")[0] for path in FILES if path.endswith(".py")}
    assert roots == {*rules.FOLDERS, "tests"}, "a root folder with code needs a place in rules.FOLDERS"


def test_no_import_cycles(sources):
    ours = [source for path, source in sources.items() if path in OURS and not source.is_test]
    modules = {rules.module_of(source) for source in ours}
    graph = {rules.module_of(source): rules.imported_modules(source, modules) for source in ours}
    assert graph["recipes.train"] >= {"recipes.trainer.run_trainer", "crosshead.common.errors"}
    assert list(TopologicalSorter(graph).static_order())  # or CycleError


def test_every_folder_is_packaged():
    folders = {path.rpartition("/")[0] for path in FILES if path.endswith("/__init__.py")}
    names = {path: "crosshead" if path == "crosshead" else f"crosshead.{path.replace('/', '.')}" for path in folders}
    installed = {name: folder for folder, name in names.items() if folder.split("/")[0] in rules.FOLDERS[1:]}
    installed |= {"crosshead": "crosshead", "crosshead_command": "crosshead/command"}
    assert TABLES["package-dir"] == installed
    assert set(TABLES["packages"]) == set(installed) | {"crosshead.common", "crosshead.demo"}  # at their own places


@pytest.mark.parametrize("folder", rules.FOLDERS)
def test_folder_is_a_typed_package(folder):
    assert f"{folder}/__init__.py" in FILES
    assert f"{folder}/py.typed" in FILES


def test_no_test_folder_shadows_the_package():
    # tests/ is on sys.path for its helpers, and a folder there comes before the editable install.
    assert not (ROOT / "tests" / "crosshead").exists()
