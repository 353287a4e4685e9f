"""The wheel contains the whole package and works without the checkout."""

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


def run_checked(*command, cwd, **environment):
    """Run a command in a folder and return its stdout; fail if its exit status is not 0."""
    settings = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(cwd / "home"), "OMP_NUM_THREADS": "1"} | environment
    ran = subprocess.run(
        list(map(str, command)), cwd=cwd, env=os.environ | settings, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, f"{command}: {ran.stdout[-2000:]}{ran.stderr[-4000:]}"
    return ran.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of the project: in place, setuptools would pick up leftovers of earlier builds."""
    folder = tmp_path_factory.mktemp("wheel")
    for file in rules.project_files():
        copy = folder / "checkout" / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    run_checked("make", "-s", "wheel", f"PYTHON={sys.executable}", cwd=folder / "checkout")
    (built,) = (folder / "checkout" / "dist").iterdir()
    return built


def metadata(wheel):
    """Return the parsed METADATA of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def requirements(wheel, extra):
    """Yield the requirements of the wheel with an extra."""
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
    """Folder with an environment that has the wheel and the requirements of its `demo` extra."""
    folder = tmp_path_factory.mktemp("elsewhere")
    python = linked_environment(folder / "env", requirements(wheel, "demo"))
    options = ("--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")
    run_checked(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, cwd=folder)
    return folder


def packaged_files():
    """Return the files that belong into the package: path in the project -> path in the wheel."""
    folders = {folder: name.replace(".", "/") for name, folder in TABLES["package-dir"].items()}
    packaged = {}
    for file in rules.project_files():
        path = file.relative_to(ROOT)
        packages = [parent.as_posix() for parent in path.parents if parent.as_posix() in folders]
        if packages:
            packaged[path.as_posix()] = f"{folders[packages[0]]}/{path.relative_to(packages[0]).as_posix()}"
    return packaged


def test_wheel_contains_every_package_file_unchanged(wheel):
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
    expected = {name: (ROOT / path).read_bytes() for path, name in packaged_files().items()}
    documents = {name for name in expected if name.endswith(".md") or "/docs/" in name or "/results/" in name}
    assert contents.keys() == expected.keys() - documents  # pages and their results are read in the repository
    assert [name for name in contents if contents[name] != expected[name]] == []
    for kind in ("evals/page/page.html", "evals/suites/quick.yaml", "evals/tasks/crosshead_grammar.jsonl"):
        assert f"crosshead/{kind}" in contents
    assert any(name.startswith("crosshead/recipes/papers/") for name in contents)


def test_wheel_metadata(wheel):
    fields = metadata(wheel)
    record = f"crosshead-{fields['Version']}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        scripts = archive.read(f"{record}/entry_points.txt").decode()
        assert archive.read(f"{record}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert fields["Version"] == "0.1.0" and wheel.name == "crosshead-0.1.0-py3-none-any.whl"
    assert fields["Description-Content-Type"].startswith("text/markdown")
    assert fields.get_payload(decode=True).decode().strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()
    assert scripts.split() == ["[console_scripts]", "crosshead", "=", "crosshead_command.main:main"]


@pytest.mark.slow
def test_wheel_works_without_checkout(elsewhere):
    program, python = (elsewhere / "env" / "bin" / name for name in ("crosshead", "python"))
    (elsewhere / "script.py").write_text(FROM)
    package, command, version, *paths = run_checked(python, "script.py", cwd=elsewhere).splitlines()
    assert all(Path(file).is_relative_to(elsewhere) for file in (package, command))
    assert version == "0.1.0"
    assert not any(Path(path).is_relative_to(ROOT) and Path(path).name != "site-packages" for path in paths)
    assert run_checked(program, "--version", cwd=elsewhere) == "crosshead 0.1.0\n"
    assert json.loads(run_checked(program, "zoo", "--json", cwd=elsewhere))


@pytest.mark.slow
def test_demo_environment_lacks_other_packages(elsewhere):
    """The demo test can only detect a missing requirement if the environment has no other packages."""
    for name in ("pytest", "trl", "selenium"):
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is not None)"
        run_checked(elsewhere / "env" / "bin" / "python", "-P", "-c", code, cwd=elsewhere)


@pytest.mark.slow
def test_demo_runs_from_the_wheel(elsewhere):
    command = (elsewhere / "env" / "bin" / "crosshead", "demo", "--tiny", "--out", "demo")
    output = run_checked(*command, cwd=elsewhere, HF_TOKEN=TOKEN)
    pages = [path for path in (elsewhere / "demo").rglob("*") if path.suffix in (".html", ".json", ".md")]
    assert {path.name for path in pages} >= {"heads.html", "scores.json", "README.md", "conversion.json"}
    assert not [path for path in pages if str(ROOT).encode() in path.read_bytes()]
    assert "explicit" in output and str(Path("demo") / "heads.html") in output
    assert run_checked(*command, cwd=elsewhere) == output
    written = [path for folder in ("demo", "home") for path in (elsewhere / folder).rglob("*") if path.is_file()]
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()] and TOKEN not in output
