"""Atomic output of several text files: existing files are replaced only after all new files are complete."""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from .errors import EvalError


def check_targets(paths: Iterable[Path], overwrite: bool) -> None:
    """`EvalError` if a file cannot be written. Called before a long computation whose result goes to these files."""
    for path in paths:
        _target(path)
        if not path.parent.is_dir():
            raise EvalError(f"the directory of {path} does not exist: create it first")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise EvalError(f"{path.parent} is not writable: choose another directory")
        if path.is_dir():
            raise EvalError(f"{path} is a directory: choose another name")
        if path.exists() and not path.is_file():
            raise EvalError(f"{path} is not a regular file: choose another name")
        if path.exists() and not overwrite:
            raise EvalError(f"{path} exists: choose another name, or add --overwrite")


def write_atomically(contents: Mapping[Path, str]) -> None:
    """Write each file under a temporary name in its directory, then rename all. The target of a link is replaced."""
    targets = {path: _target(path) for path in contents}
    partial = {path: target.with_name(f".{target.name}.partial") for path, target in targets.items()}
    try:
        for path, content in contents.items():
            partial[path].unlink(missing_ok=True)  # a leftover may be a link to another file
            partial[path].write_text(content, encoding="utf-8")
        for path in contents:
            partial[path].replace(targets[path])
    except OSError as error:
        raise EvalError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        for leftover in partial.values():
            with suppress(OSError):
                leftover.unlink(missing_ok=True)


def _target(path: Path) -> Path:
    """The file to write, which is the target of a link; `EvalError` for a broken link."""
    if path.is_symlink() and not path.exists():
        raise EvalError(f"{path} is a broken link: remove it")
    return Path(os.path.realpath(path))
