"""Reads the user's files: rows with labels, plain text, and folders of images. Errors name the file and the row."""

from pathlib import Path
from typing import Any

from crosshead.common.errors import EvalError, nearest
from crosshead.common.images import IMAGE_SUFFIXES, is_image
from crosshead.common.plain_text import check_characters, json_object, read_text

TEXT_COLUMNS = (
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("premise", "hypothesis"),
    ("#1 String", "#2 String"),
    ("sentence",),
)
"""Text columns in the tasks of GLUE, in its own files and on the Hub; the first complete entry is used."""
LABEL_COLUMNS = ("label", "gold_label", "score", "is_duplicate", "Quality")
"""Names of the label column in the tasks of GLUE; the first one in a row is used."""
SUFFIXES = (".tsv", ".jsonl", ".json")
LISTED_CLASSES = 4
"""Maximum number of class names in a message."""
Row = tuple[str, tuple[str, ...], Any]
"""File and line of a row (for messages), its texts, and its label."""


def read_rows(path: Path, limit: int | None) -> list[Row]:
    """Read the rows of a file with tab-separated values, which are never quoted, or with JSON lines."""
    if path.suffix not in SUFFIXES or not path.is_file():
        raise EvalError(
            f"{path} is not a file with rows: a sequence classifier reads {', '.join(SUFFIXES)} (JSON lines)"
        )
    lines = [line.removesuffix("\r") for line in read_text(path, EvalError).split("\n")]
    header = lines[0].split("\t") if path.suffix == ".tsv" else None
    if header and (twice := next((name for name in header if header.count(name) > 1), None)) is not None:
        raise EvalError(f"{path}, line 1: the column {twice!r} is there twice: rename one")
    first = 0 if header is None else 1
    numbered = [(number, line) for number, line in enumerate(lines[first:], first + 1) if line.strip()]
    rows = [_row(f"{path}, line {number}", line, header) for number, line in numbered[:limit]]
    if not rows:
        raise EvalError(f"{path} has no rows")
    return rows


def _row(where: str, line: str, header: list[str] | None) -> Row:
    """Parse one row. Its columns are looked up anew, because the fields of JSON lines may differ."""
    fields = json_object(line, where, EvalError) if header is None else _fields(where, line, header)
    names = next((names for names in TEXT_COLUMNS if all(name in fields for name in names)), None)
    label = next((name for name in LABEL_COLUMNS if name in fields), None)
    for columns, known in ((names, [" and ".join(names) for names in TEXT_COLUMNS]), (label, LABEL_COLUMNS)):
        if columns is None:
            expected = f"{', '.join(known[:-1])} or {known[-1]}"
            raise EvalError(f"{where}: no column {expected}; the columns are {', '.join(map(repr, fields))}")
    texts = tuple(fields[name] for name in names or ())
    for name, text in zip(names or (), texts, strict=True):
        if not isinstance(text, str) or not text.strip():
            raise EvalError(f"{where}: {name} is {text!r}, not a text")
        check_characters(text, f"{where}: {name}", EvalError)
    return where, texts, fields[label or ""]


def _fields(where: str, line: str, header: list[str]) -> dict[str, Any]:
    values = line.split("\t")
    if len(values) != len(header):
        raise EvalError(f"{where} has {len(values)} columns, but the header has {len(header)}")
    return dict(zip(header, values, strict=True))


def text_files(path: Path) -> list[Path]:
    """Return the file itself, or the .txt files in a folder and its subfolders."""
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*.txt") if file.is_file())
    if not files:
        raise EvalError(f"{path} has no .txt files")
    return files


def class_folders(path: Path) -> dict[Path, list[Path]]:
    """Return the images in each subfolder of a folder; a subfolder without images is left out."""
    if not path.is_dir():
        raise EvalError(
            f"{path} is not a folder: an image classifier reads a folder with one subfolder for each class"
        )
    loose = sorted(file for file in path.iterdir() if is_image(file, path))
    if loose:
        raise EvalError(f"{loose[0]} lies in no subfolder: put each image into the subfolder of its class")
    folders = sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    files = {folder: sorted(file for file in folder.rglob("*") if is_image(file, folder)) for folder in folders}
    if not any(files.values()):
        raise EvalError(f"{path} has no images in subfolders: give {', '.join(IMAGE_SUFFIXES)} files")
    return {folder: images for folder, images in files.items() if images}


def class_of(config: Any, label: Any, where: str) -> int:
    """Return the index of a class by its name or its number; `EvalError` if it is unknown or ambiguous."""
    names = {int(index): str(name) for index, name in config.id2label.items()}
    matches = [index for index, name in names.items() if name == label]
    if not matches and isinstance(label, str) and label.isascii() and label.isdigit():
        label = int(label)
    if isinstance(label, float) and label.is_integer():  # pandas writes 1.0 if a column has missing values
        label = int(label)
    if not matches and isinstance(label, int) and not isinstance(label, bool) and label in names:
        matches = [label]
    if len(matches) > 1:
        raise EvalError(
            f"{where}: the model has {len(matches)} classes {label!r}: use the class's number, such as {matches[0]}"
        )
    if not matches:
        classes = ", ".join(list(names.values())[:LISTED_CLASSES]) + (", ..." if len(names) > LISTED_CLASSES else "")
        raise EvalError(
            f"{where}: unknown class {label!r}: the model has the classes 0 to {len(names) - 1}, named {classes}"
            f"{nearest(str(label), names.values())}"
        )
    return matches[0]
