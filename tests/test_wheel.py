"""The wheel holds the whole package, and works where the checkout is not."""

import email
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import rules
from linked_environment import linked_environment
from rules import ROOT
from test_rules import TABLES

TOKEN = "hf_" + "NobodyMayReadThisInWhatTheDemoMakes"
FROM = """
import sys, crosshead, crosshead_command
from importlib.metadata import version
print(crosshead.__file__, crosshead_command.__file__, crosshead.__version__, *sys.path, sep="\\n")
"""


def done(*command, cwd, **environment):
    """What a process in another folder says."""
    settings = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(cwd / "home"), "OMP_NUM_THREADS": "1"} | environment
    ran = subprocess.run(
        list(map(str, command)), cwd=cwd, env=os.environ | settings, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, f"{command}: {ran.stdout[-2000:]}{ran.stderr[-4000:]}"
    return ran.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: setuptools would take up what an earlier build has left."""
    place = tmp_path_factory.mktemp("wheel")
    for file in rules.project_files():
        copy = place / "checkout" / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    done("make", "-s", "wheel", f"PYTHON={sys.executable}", cwd=place / "checkout")
    (built,) = (place / "checkout" / "dist").iterdir()
    return built


def metadata(wheel):
    """What the wheel says of itself."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def requirements(wheel, extra):
    """What the wheel asks for with an extra."""
    for line in metadata(wheel).get_all("Requires-Dist"):
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            if requirement.name == "crosshead":
                for other in requirement.extras:
                    yield from requirements(wheel, other)
            else:
                requirement.marker = None
                yield str(requirement)


@pytest.fixture(scope="module")
def elsewhere(wheel, tmp_path_factory):
    """An environment with the wheel, and what it says that the demo needs."""
    place = tmp_path_factory.mktemp("elsewhere")
    python = linked_environment(place / "env", requirements(wheel, "demo"))
    options = ("--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")
    done(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, cwd=place)
    return place


def packaged_files():
    """Every file of the project that belongs into the package -> its place there."""
    folders = {folder: name.replace(".", "/") for name, folder in TABLES["package-dir"].items()}
    found = {}
    for file in rules.project_files():
        path = file.relative_to(ROOT)
        within = [parent.as_posix() for parent in path.parents if parent.as_posix() in folders]
        if within:
            found[path.as_posix()] = f"{folders[within[0]]}/{path.relative_to(within[0]).as_posix()}"
    return found


def test_the_wheel_holds_every_file_of_the_package_as_it_is(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
    expected = {place: (ROOT / path).read_bytes() for path, place in packaged_files().items()}
    documents = {place for place in expected if place.endswith(".md") or "/docs/" in place or "/results/" in place}
    assert held.keys() == expected.keys() - documents  # pages and their results are read in the repository
    assert [name for name in held if held[name] != expected[name]] == []
    for kind in ("evals/page/page.html", "evals/suites/quick.yaml", "evals/tasks/crosshead_grammar.jsonl"):
        assert f"crosshead/{kind}" in held
    assert any(name.startswith("crosshead/recipes/papers/") for name in held)


def test_the_wheel_says_what_it_is(wheel):
    said = metadata(wheel)
    record = f"crosshead-{said['Version']}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        scripts = archive.read(f"{record}/entry_points.txt").decode()
        assert archive.read(f"{record}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert said["Version"] == "0.1.0" and wheel.name == "crosshead-0.1.0-py3-none-any.whl"
    assert said["Description-Content-Type"].startswith("text/markdown")
    assert said.get_payload(decode=True).decode().strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()
    assert scripts.split() == ["[console_scripts]", "crosshead", "=", "crosshead_command.main:main"]


@pytest.mark.slow
def test_the_wheel_works_where_the_checkout_is_not(elsewhere):
    program, python = (elsewhere / "env" / "bin" / name for name in ("crosshead", "python"))
    (elsewhere / "script.py").write_text(FROM)
    package, command, version, *paths = done(python, "script.py", cwd=elsewhere).splitlines()
    assert all(Path(file).is_relative_to(elsewhere) for file in (package, command))
    assert version == "0.1.0"
    assert not any(Path(path).is_relative_to(ROOT) and Path(path).name != "site-packages" for path in paths)
    assert done(program, "--version", cwd=elsewhere) == "crosshead 0.1.0\n"
    assert json.loads(done(program, "zoo", "--json", cwd=elsewhere))


@pytest.mark.slow
def test_what_the_demo_does_not_ask_for_is_not_there(elsewhere):
    """Else the demo would not show what it needs."""
    for name in ("pytest", "trl", "selenium"):
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is not None)"
        done(elsewhere / "env" / "bin" / "python", "-P", "-c", code, cwd=elsewhere)


@pytest.mark.slow
def test_the_demo_runs_from_the_wheel(elsewhere):
    command = (elsewhere / "env" / "bin" / "crosshead", "demo", "--tiny", "--out", "demo")
    told = done(*command, cwd=elsewhere, HF_TOKEN=TOKEN)
    pages = [path for path in (elsewhere / "demo").rglob("*") if path.suffix in (".html", ".json", ".md")]
    assert {path.name for path in pages} >= {"heads.html", "scores.json", "README.md", "conversion.json"}
    assert not [path for path in pages if str(ROOT).encode() in path.read_bytes()]
    assert "explicit" in told and str(Path("demo") / "heads.html") in told
    assert done(*command, cwd=elsewhere) == told
    written = [path for place in ("demo", "home") for path in (elsewhere / place).rglob("*") if path.is_file()]
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()] and TOKEN not in told
