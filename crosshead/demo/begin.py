"""What is checked before the demo's first step."""

import os
from importlib.util import find_spec
from pathlib import Path

from .run import FULL, SMALL, Demo
from .sources import own, smollm2, tiny
from .steps import RECORD, Record

NEEDED = ("accelerate", "datasets", "gguf", "jinja2", "lm_eval")
FOLDER = "crosshead-demo"


def open_demo(model: str | None, is_tiny: bool, out: Path | None) -> Demo:
    """The demo of a model in a folder; a `ValueError` of one line where it could not be."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ValueError(f"the demo needs {' and '.join(missing)}: pip install 'crosshead[demo]'")
    folder = (out or Path(f"{FOLDER}-tiny" if is_tiny else FOLDER)).expanduser()
    _check_folder(folder)
    start = tiny(folder) if is_tiny else smollm2(folder) if model is None else own(model, folder)
    there = Record(folder).content.get("model", start.label)
    if there != start.label:
        raise ValueError(f"{folder} holds a demo of {there}, not of {start.label}: choose another folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    Record(folder).put(model=start.label)
    return Demo(start, folder, SMALL if is_tiny else FULL)


def _check_folder(folder: Path) -> None:
    """Nothing of anybody else's is in it, and it can be written."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: choose another place with --out")
    if folder.is_dir() and not (folder / RECORD).exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} holds files, and no {RECORD}: choose another folder with --out")
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"{folder} cannot be written: choose another place with --out")
