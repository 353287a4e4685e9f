"""Writes several files together: all of them, or none."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from .errors import EvalError


def check_targets(paths: Iterable[Path], overwrite: bool) -> None:
    """`EvalError` if a file cannot be written; called before the work is done."""
    for path in paths:
        if not path.parent.is_dir():
            raise EvalError(f"{path} is in a folder that does not exist: make it first")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise EvalError(f"{path.parent} cannot be written to: choose another folder")
        if path.is_dir():
            raise EvalError(f"{path} is a folder: choose another name")
        if path.exists() and not overwrite:
            raise EvalError(f"{path} exists: choose another name, or add --overwrite")


def write_whole(contents: Mapping[Path, str]) -> None:
    """Write all files under temporary names, then replace the old files."""
    partial = {path: path.with_name(f".{path.name}.partial") for path in contents}
    try:
        for path, content in contents.items():
            partial[path].write_text(content, encoding="utf-8")
        for path in contents:
            partial[path].replace(path)
    except OSError as error:
        raise EvalError(f"{next(iter(contents))} cannot be written: {error.strerror}") from error
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)
