"""What crosshead saves loads where crosshead is not, with the same logits, and still does after being saved there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "published"
WITHOUT_CROSSHEAD = """
import runpy, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "crosshead":
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)

sys.meta_path.insert(0, Blocker())
import importlib.util
importlib.util.find_spec = lambda name, package=None, find=importlib.util.find_spec: (
    None if name == "crosshead" else find(name, package)
)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*arguments: str, home: Path) -> str:
    """Run python in a process of its own, offline, with an empty cache of remote code."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(home), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, cwd=home)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_published_models_load_without_crosshead(tmp_path: Path) -> None:
    for home in ("writer", "reader", "second reader"):
        (tmp_path / home).mkdir()
    run(str(SCRIPTS / "write.py"), str(tmp_path / "first"), home=tmp_path / "writer")
    reader = ["-c", WITHOUT_CROSSHEAD, str(SCRIPTS / "load.py")]
    found = run(*reader, str(tmp_path / "first"), str(tmp_path / "second"), home=tmp_path / "reader")
    assert "37 models loaded" in found
    found = run(*reader, str(tmp_path / "second"), str(tmp_path / "third"), home=tmp_path / "second reader")
    assert "37 models loaded" in found


def test_the_blocker_blocks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import crosshead")
    with pytest.raises(AssertionError, match="crosshead is not installed here"):
        run("-c", WITHOUT_CROSSHEAD, str(script), home=tmp_path)
