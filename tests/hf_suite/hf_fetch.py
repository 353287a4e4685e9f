"""Fetches the tests of transformers from its source distribution, and adds stand-ins for missing modules."""

import subprocess
import sys
import tarfile
import tempfile
import zlib
from pathlib import Path, PurePosixPath

PACKAGE = "hf_upstream_tests"
"""The package name under which the unpacked tests are imported; `tests` would be ambiguous."""

STAND_INS: dict[str, str] = {
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
}
"""Path -> content of modules that test_modeling_common.py imports but no source distribution has (5.17 to 5.23)."""


class FetchError(Exception):
    """The tests of transformers cannot be fetched; the message is one line."""


def download(version: str, cache: Path) -> Path:
    """The path of the source distribution of transformers `version`, downloaded if it is not in `cache`.

    The option is `--no-binary transformers`, not `:all:`, with which pip would also build setuptools from source to
    prepare the metadata of the package; that fails if `wheel` is missing.
    """
    target = cache / f"transformers-{version}.tar.gz"
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        options = ["--no-binary", "transformers", f"transformers=={version}", "--dest", folder]
        run = subprocess.run(pip + options, capture_output=True, text=True)
        downloaded = Path(folder) / target.name
        if run.returncode or not downloaded.exists():
            errors = [line for line in run.stderr.splitlines() if line.lower().startswith("error")]
            why = errors[-1] if errors else (run.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
            raise FetchError(
                f"cannot fetch the source of transformers {version} from the package index (no network?): {why}"
            )
        downloaded.replace(target)
    return target


def unpack(archive: Path, version: str, cache: Path) -> Path:
    """Unpack the Python files of `tests/` into `cache`; return the folder for the import path.

    Only regular files with safe names are extracted, so no file is written outside the folder.
    """
    root = cache / version
    package = root / PACKAGE
    prefix = f"transformers-{version}/tests/"
    count = 0
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                path = PurePosixPath(member.name.removeprefix(prefix))
                if not (member.isfile() and member.name.startswith(prefix) and path.suffix == ".py"):
                    continue
                source = tar.extractfile(member)
                if source is None or path.is_absolute() or ".." in path.parts:
                    raise FetchError(f"{archive.name} holds a file with an unsafe name: {member.name!r}")
                write(package / path, source.read())
                count += 1
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise FetchError(f"cannot unpack {archive}: {error} (delete it to fetch it again)") from error
    if not (package / "test_modeling_common.py").exists():
        raise FetchError(f"the source of transformers {version} has no tests/test_modeling_common.py ({count} files)")
    for name, text in STAND_INS.items():
        if not (package / name).exists():
            write(package / name, text.encode())
    return root


def write(path: Path, data: bytes) -> None:
    """Write `data` to `path`, and create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def fetch(version: str, cache: Path) -> Path:
    """Fetch the tests of transformers `version`; return the folder from which they are importable as `PACKAGE`."""
    cache.mkdir(parents=True, exist_ok=True)
    (cache / ".gitignore").write_text("*\n")
    return unpack(download(version, cache), version, cache)
