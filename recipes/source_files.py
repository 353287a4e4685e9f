"""The local files of a data source, and what tells one state of them from another."""

from glob import glob
from pathlib import Path
from typing import Any

from .data_options import DataSource
from .errors import RecipeError

SUFFIXES = {"text": ".txt", "jsonl": ".jsonl", "parquet": ".parquet"}
"""Kind of source -> which files of a folder belong to it."""


def source_files(source: DataSource) -> list[Path]:
    """The files of a source of local files, in the order of their names."""
    place = Path(source.path).expanduser()
    suffix = SUFFIXES[source.kind]
    if place.is_file():
        return [place]
    if place.is_dir():
        files = sorted(path for path in place.rglob(f"*{suffix}") if path.is_file())
        advice = f"no {suffix} file at any depth: name its files by a pattern, such as {source.path}/**/*"
    else:
        files = sorted(path for path in map(Path, glob(str(place), recursive=True)) if path.is_file())
        advice = "no file there: check the path"
    if not files:
        raise RecipeError(f"the {source.kind} source {source.path} has {advice}")
    return files


def total_size(source: DataSource) -> int | None:
    """The bytes that will be read; None where nobody knows beforehand."""
    return None if source.kind == "hub" else sum(path.stat().st_size for path in source_files(source))


def identity(source: DataSource) -> dict[str, Any]:
    """What the documents of a source depend on, in JSON types; equal as long as they are the same."""
    limit = {"kind": source.kind, "max_tokens": source.max_tokens}
    if source.kind == "text":
        return limit | {"files": _states(source_files(source))}
    if source.kind != "hub":
        return limit | {"files": _states(source_files(source)), "column": source.column}
    folder = Path(source.path).expanduser()
    copy = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
    names = {"name": source.path, "subset": source.subset, "split": source.split, "revision": source.revision}
    return limit | names | {"files": _states(copy), "column": source.column}


def _states(files: list[Path]) -> list[tuple[str, int, int]]:
    """Absolute path, size and time of the last change."""
    found = []
    for path in files:
        status = path.stat()
        found.append((str(path.resolve()), status.st_size, status.st_mtime_ns))
    return found
