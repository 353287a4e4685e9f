"""Makes the demo's table of results from the JSON files of its steps."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from crosshead.conversion.sources.model_folder import RECORD, record_file

Row = dict[str, Any]
GRAMMAR, PROSE = "grammar", "prose"
HEADS = ("model", "KV cache", "perplexity", "against source", "grammar", "against source")
"""Column heads; UNITS is the second line."""
LARGEST = 1e5
"""Perplexities from this value on are shown in scientific notation."""
UNITS = ("", "bytes/token", "of prose", "", "right", "")


def rows(descriptions: Mapping[str, str], models: Mapping[str, str], scores: Path, decoded: Path) -> list[Row]:
    """One row per model, the source first: cache, scores, and differences from the source.

    `descriptions` and `models` map a name to a description and a path; `scores` and `decoded` are JSON files.
    """
    report, caches = _read(scores), {each["model"]: each for each in _read(decoded)["models"]}
    scored = {each["model"]: each for each in report["models"]}
    changes = {each["second"]: each for each in report["compared"]}
    made = {name: _record(Path(path))["verification"] for name, path in list(models.items())[1:]}
    before = next(iter(made.values()))["kv_bytes_per_token_before"]
    return [
        {
            "name": name,
            "is": descriptions[name],
            "model": path,
            "kv_bytes_per_token": made[name]["kv_bytes_per_token_after"] if name in made else before,
            "parameters": scored[path]["parameters"],
            "scores": {row["name"]: row["score"] for row in scored[path]["scores"]},
            "changes": {row["name"]: row for row in changes[path]["scores"]} if path in changes else {},
            "decoded": caches.get(path),
        }
        for name, path in models.items()
    ]


def table_lines(models: list[Row]) -> Iterator[str]:
    """The table as text, with two lines per model: numbers and description."""
    cells = [_cells(row) for row in models]
    widths = [max(map(len, column)) for column in zip(HEADS, UNITS, *cells, strict=True)]
    for line, row in zip((HEADS, UNITS, *cells), (None, None, *models), strict=True):
        padded = [line[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        yield "  ".join(padded).rstrip()
        if row is not None:
            yield f"  {row['is']}"


def _cells(row: Row) -> tuple[str, ...]:
    scores, changes = row["scores"], row["changes"]
    return (
        row["name"],
        f"{row['kv_bytes_per_token']:,}",
        f"{scores[PROSE]:.2f}" if scores[PROSE] < LARGEST else f"{scores[PROSE]:.1e}",
        _change(changes.get(PROSE), 100, "%"),
        f"{scores[GRAMMAR]:.3f}",
        _change(changes.get(GRAMMAR), 1, ""),
    )


def _change(row: Mapping[str, Any] | None, scale: int, unit: str) -> str:
    """A difference from the source with its confidence interval, which one item does not have."""
    if row is None:
        return ""
    if row["verdict"] == "equal":
        return "the same"
    digits = 1 if unit else 3
    values = (row["change"], *(row["interval"] or ()))
    change, *bounds = (f"{scale * value:+.{digits}f}{unit}" for value in values)
    return f"{change} [{', '.join(bounds)}]" if bounds else change


def sample_lines(models: list[Row], prompt: str) -> Iterator[str]:
    """The decoded text of each model and the size of its KV cache, as lines."""
    yield f"{prompt} ..."
    for row in models:
        if row["decoded"] is not None:
            text, tokens = " ".join(row["decoded"]["text"].split()), row["decoded"]["cached_tokens"]
            yield f"  {row['name']}: {text!r}"
            yield f"    {row['decoded']['cache_bytes']:,} bytes of cache for {tokens} tokens"


def _record(folder: Path) -> Any:
    """The record of a conversion: in the folder, or for a stock model next to it."""
    inside = folder / RECORD
    return _read(inside if inside.is_file() else record_file(folder, stock=True))


def _read(path: Path) -> Any:
    return json.loads(path.read_bytes())
