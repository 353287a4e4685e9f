"""A virtual environment with selected distributions only, symlinked from the environment that runs the tests."""

import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def required(requirements: Iterable[str]) -> set[str]:
    """Return the names of the distributions that the requirements need, including transitive dependencies."""
    visited: set[tuple[str, str]] = set()
    todo = [(Requirement(line), "") for line in requirements]
    while todo:
        requirement, with_extra = todo.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": with_extra}):
            continue
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) not in visited:
                visited.add((name, extra))
                todo += [(Requirement(line), extra) for line in distribution(name).requires or ()]
    return {name for name, _ in visited}


def linked_environment(folder: Path, requirements: Iterable[str]) -> Path:
    """Create the environment in `folder`, without pip; return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in required(requirements):
        installed = distribution(name)
        for part in {file.parts[0] for file in installed.files or ()} - {"..", "__pycache__", "bin"}:
            if not (packages / part).exists():
                (packages / part).symlink_to(Path(str(installed.locate_file(part))).resolve())
    return folder / "bin" / "python"
