"""The local files of a data source, and what tells one state of them from another."""

import os
from glob import escape, glob
from pathlib import Path
from typing import Any, NoReturn

from crosshead.common.errors import RecipeError

from ..schema.sections import DataSource

SUFFIXES = {"text": ".txt", "jsonl": ".jsonl", "parquet": ".parquet"}
"""Kind of source -> which files of a folder belong to it."""


def source_files(source: DataSource) -> list[Path]:
    """The files of a source of local files, in the order of their names."""
    place = Path(expanded(source.path))
    suffix = SUFFIXES[source.kind]
    if place.is_file():
        return [place]
    if place.is_dir():
        files = _files_below(place, suffix)
        advice = f"no {suffix} file at any depth: name its files by a pattern, such as {source.path}/**/*"
    else:
        files = _files_like(place)
        advice = "no file there: check the path"
    if not files:
        raise RecipeError(f"the {source.kind} source {source.path} has {advice}")
    return files


def expanded(place: str) -> str:
    """A path with the home folder for its `~`; as it is where it has none, as names on the Hub."""
    path = os.path.expanduser(place)
    if path.startswith("~"):
        raise RecipeError(f"{place} begins with the home folder of nobody here: write the whole path")
    return path


def _files_below(folder: Path, suffix: str) -> list[Path]:
    paths = (Path(root, name) for root, _, names in os.walk(folder, onerror=_refuse) for name in names)
    return sorted(path for path in paths if path.name.endswith(suffix) and path.is_file())


def _files_like(pattern: Path) -> list[Path]:
    for part in (pattern, *pattern.parents):
        if escape(part.name) != part.name:
            _check_folders(part if part.name == "**" else part.parent)
    return sorted(path for path in map(Path, glob(str(pattern), recursive=True)) if path.is_file())


def _check_folders(pattern: Path) -> None:
    """`glob` leaves out, without a word, what lies in folders that it may not list."""
    for path in filter(os.path.isdir, glob(str(pattern), recursive=True)):
        try:
            os.scandir(path).close()
        except OSError as error:
            _refuse(error)


def _refuse(error: OSError) -> NoReturn:
    raise RecipeError(
        f"the folder {error.filename} cannot be read: {error.strerror}: make it readable, or move it elsewhere"
    ) from error


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
    path = expanded(source.path)
    copy = _files_below(Path(path), "") if os.path.isdir(path) else []
    names = {"name": path, "subset": source.subset, "split": source.split, "revision": source.revision}
    return limit | names | {"files": _states(copy), "column": source.column}


def _states(files: list[Path]) -> list[tuple[str, int, int]]:
    """Absolute path, size and time of the last change."""
    found = []
    for path in files:
        status = path.stat()
        found.append((str(path.resolve()), status.st_size, status.st_mtime_ns))
    return found
