"""The two remote code files that are saved with a model."""

import ast
import os
import subprocess
import sys
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.dynamic_module_utils import get_class_from_dynamic_module

import crosshead
from crosshead.modeling import bundle
from crosshead.modeling.bundle import BundleError, code_files
from crosshead.modeling.mechanisms import RULES
from crosshead.modeling.mechanisms.base import AttentionState
from crosshead.modeling.mechanisms.gating import Gating
from toys import (
    BACKBONES,
    CASES,
    ENCODERS,
    MECHANISM_CASES,
    SHARED_ROTARY,
    SHARED_ROTARY_CASES,
    mixed_config,
    mixed_model,
    mixers_of,
    tokens,
)

ROOT = Path(__file__).parents[2]
NAMES = ["configuration_crosshead.py", "modeling_crosshead.py"]
FIVE: dict[str, Any] = {
    "knocking": {},
    "explicit": {"norm": False},
    "mixture": {"active_heads": 2, "layers": [0]},
    "talking": {"layers": [0]},
    "differential": {"layers": [1]},
}
SIX: dict[str, Any] = {**FIVE, "gating": {}}
LINES = {"talking": 1500}
"""Maximum number of lines of both files with one mechanism; 1,300 for mechanisms that are not listed."""
FURTHER_LINES = {"Qwen3Moe": 85, "Bert": 70, "Albert": 130, **dict.fromkeys(SHARED_ROTARY, 165)}
"""Additional lines per backbone: Qwen3-MoE for its router with expert biases and its auxiliary loss; encoders for four
task heads and losses; MLA and GTA for their attention."""
FIVE_LINES = 2300
"""Maximum number of lines of both files with the five mechanisms."""
LEFT_OUT = ("package_only", "access_tokens", "write_code", "triton")


def line_count(files: dict[str, str]) -> int:
    return sum(text.count("\n") for text in files.values())


@pytest.mark.parametrize(
    ("backbone", "case"),
    [
        *product((*BACKBONES, *ENCODERS), MECHANISM_CASES),
        *product(SHARED_ROTARY, [case for case in SHARED_ROTARY_CASES if case in MECHANISM_CASES]),
    ],
)
def test_code_files_contain_only_used_mechanism_and_backbone(case: str, backbone: str) -> None:
    files = code_files(mixed_config(backbone, mixers_of(case, backbone)))
    assert list(files) == NAMES
    assert line_count(files) <= LINES.get(case, 1300) + FURTHER_LINES.get(backbone, 0)
    defined = {node.name for text in files.values() for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    for name, mechanism in crosshead.MECHANISMS.items():
        assert ({mechanism.__name__, mechanism.rules.__name__} <= defined) == (name == case)
    every = (*BACKBONES, *SHARED_ROTARY, *ENCODERS)
    assert [other for other in every if f"Crosshead{other}Model" in defined] == [backbone]
    for text in files.values():
        assert f"crosshead {crosshead.__version__}" in text[:200] and case in text[:200]
        assert not [word for word in LEFT_OUT if word in text]


@pytest.mark.parametrize("backbone", BACKBONES)
def test_code_files_of_five_mechanisms_stay_within_line_limit(backbone: str) -> None:
    assert line_count(code_files(mixed_config(backbone, FIVE))) <= FIVE_LINES + FURTHER_LINES.get(backbone, 0)


def test_code_files_pass_ruff_check_and_format(tmp_path: Path) -> None:
    several = {**CASES, "five": FIVE, "six": SIX, "none": {}}
    for backbone in (*BACKBONES, *SHARED_ROTARY):
        cases = several if backbone in BACKBONES else {**SHARED_ROTARY_CASES, "none": {}}
        for case, mixers in cases.items():
            folder = tmp_path / f"{backbone}-{case}"
            bundle.write_code(mixed_config(backbone, mixers), folder)
            for name in NAMES:
                compile((folder / name).read_text(encoding="utf-8"), name, "exec")
    config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    for command in (["check", *config], ["format", "--check", *config]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "."], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout


@torch.no_grad()
def test_remote_code_of_six_mechanisms_gives_the_same_logits(warm_process: Any, tmp_path: Path) -> None:
    model, environment = mixed_model("Qwen3", SIX), os.environ | {"HF_HUB_OFFLINE": "1"}
    model.save_pretrained(tmp_path / "model")
    text = (tmp_path / "model" / NAMES[1]).read_text(encoding="utf-8")
    defined = {node.name for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    assert {crosshead.MECHANISMS[name].__name__ for name in SIX} <= defined
    save_file({"ids": tokens()}, tmp_path / "inputs.safetensors")
    command = [sys.executable, "-P", str(Path(__file__).with_name("remote_code_worker.py")), str(tmp_path)]
    done = warm_process.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert torch.equal(load_file(tmp_path / "outputs.safetensors")["logits"], model(tokens()).logits)


def test_clashing_definitions_raise_bundle_error(monkeypatch: pytest.MonkeyPatch) -> None:
    read = bundle.read_module

    def renamed(name: str) -> bundle.Module:
        module = deepcopy(read(name))
        if name == "cache":
            names = frozenset({"update_cache", "check_layer"})
            module.definitions.insert(
                0, bundle.Definition(name, "update_cache = check_layer = None", names, frozenset())
            )
        return module

    monkeypatch.setattr(bundle, "read_module", renamed)
    with pytest.raises(BundleError, match="check_layer"):
        code_files(mixed_config("Llama", {"explicit": {}}))


def test_resaved_remote_code_model_keeps_code_files(tmp_path: Path) -> None:
    model = mixed_model("Qwen3", {"explicit": {}})
    model.save_pretrained(tmp_path / "first")
    worker = (
        "import sys; sys.modules['crosshead'] = None\n"
        "import torch\n"
        "from transformers import AutoConfig, AutoModel, AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained('first', trust_remote_code=True)\n"
        "loaded = [name for name in sys.modules if name.endswith('configuration_crosshead')]\n"
        "assert len(loaded) == 1, loaded\n"
        "model.save_pretrained('second')\n"
        "model.model.save_pretrained('part')\n"
        "model.config.save_pretrained('config')\n"
        "assert AutoConfig.from_pretrained('config', trust_remote_code=True).mixers == model.config.mixers\n"
        "part = AutoModel.from_pretrained('part', trust_remote_code=True)\n"
        "assert all(map(torch.equal, model.model.state_dict().values(), part.state_dict().values()))\n"
        "config = AutoConfig.from_pretrained('first', trust_remote_code=True)\n"
        "try:\n"
        "    type(config)(mixers={'knocking': {}})\n"
        "except ValueError as error:\n"
        "    assert 'knocking' in str(error) and 'install' in str(error) and 'crosshead' in str(error), error\n"
        "else:\n"
        "    raise AssertionError('a mechanism that the code does not hold was accepted')\n"
    )
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    environment["PYTHONPATH"] = os.path.abspath(os.environ.get("PYTHONPATH", "."))  # may have an older transformers
    done = subprocess.run(
        [sys.executable, "-P", "-c", worker], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for name in [*NAMES, "config.json"]:
        assert (tmp_path / "first" / name).read_text() == (tmp_path / "second" / name).read_text()
    for folder in ("second", "part", "config"):
        assert sorted(path.name for path in (tmp_path / folder).glob("*.py")) == NAMES


def test_auto_map_of_config_subclass_names_existing_classes(tmp_path: Path) -> None:
    class Mine(crosshead.CrossheadLlamaConfig):
        model_type = "mine"

    config = Mine(**mixed_config("Llama", {"knocking": {}}).to_dict() | {"model_type": "mine"})
    config.save_pretrained(tmp_path)
    for reference in config.auto_map.values():
        module, name = reference.split(".")
        tree = ast.parse((tmp_path / f"{module}.py").read_text(encoding="utf-8"))
        imported = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
        assert name in imported | {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


def test_adding_page_contains_whole_gating_module() -> None:
    page = (ROOT / "modeling" / "docs" / "adding.md").read_text(encoding="utf-8")
    assert (ROOT / "modeling" / "mechanisms" / "gating.py").read_text(encoding="utf-8") in page


@torch.no_grad()
def test_remote_code_of_talking_loads_from_folders_with_any_name(tmp_path: Path) -> None:
    model = mixed_model("Llama", {"talking": {}}, "sdpa")
    for name in ("modèle", "模型", "a model.1"):
        model.save_pretrained(tmp_path / name)
        kind = get_class_from_dynamic_module(model.config.auto_map["AutoModelForCausalLM"], tmp_path / name)
        loaded = kind.from_pretrained(tmp_path / name, attn_implementation="sdpa")
        assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)


def test_mechanism_of_another_package_is_refused_before_anything_is_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Doubled(Gating):
        def head_outputs(self, output: torch.Tensor, state: AttentionState) -> torch.Tensor:
            return 2 * output

    for table, kind in ((crosshead.MECHANISMS, Doubled), (RULES, Doubled.rules)):
        monkeypatch.setitem(table, "doubled", kind)
    model = mixed_model("Llama", {"doubled": {}})
    assert not torch.equal(model(tokens()).logits, mixed_model("Llama", {"gating": {}})(tokens()).logits)
    with pytest.raises(ValueError, match=r"'doubled' cannot be saved .*test_bundle; move it to modeling/mechanisms"):
        model.save_pretrained(tmp_path / "model")
    assert not list(tmp_path.rglob("*.*"))
