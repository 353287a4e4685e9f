"""Saved models load in an environment with torch and transformers only, also after they are saved again there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from linked_environment import linked_environment
from toys import BACKBONES, CASES

SCRIPTS = Path(__file__).parent / "published"


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Interpreter of an environment with torch, transformers and their dependencies only."""
    return linked_environment(tmp_path_factory.mktemp("bare") / "env", ["torch", "transformers"])


def run(python: Path | str, *arguments: str | Path, home: Path) -> str:
    """Run a script in a subprocess, offline, with an empty cache of remote code; return its stdout."""
    home.mkdir()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(home), "OMP_NUM_THREADS": "1"}
    command = [str(python), "-P", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=home)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("tier", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_published_models_load_without_crosshead(tier: str, bare: Path, tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    run(sys.executable, SCRIPTS / "write.py", first, tier, home=tmp_path / "writer")
    written = len(list(first.iterdir()))
    assert written == len(BACKBONES) * (len(CASES) + 1) + 1 if tier == "all" else written > len(CASES)
    output = run(bare, SCRIPTS / "load.py", first, second, home=tmp_path / "reader")
    assert output.startswith(f"{written} models loaded")
    output = run(bare, SCRIPTS / "load.py", second, third, home=tmp_path / "second reader")
    assert output.startswith(f"{written} models loaded")


def test_bare_environment_lacks_crosshead_and_test_packages(bare: Path, tmp_path: Path) -> None:
    code = (
        "import importlib.util as i; print([n for n in ('crosshead', 'peft', 'pytest', 'lm_eval') if i.find_spec(n)])"
    )
    assert run(bare, "-c", code, home=tmp_path / "home").split() == ["[]"]
