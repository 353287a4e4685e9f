"""The files of a folder that belong to its model; all others, such as notes and a card, are the user's own."""

import json
import os
import re
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_relative_import_files

from ..sources.model_folder import CONFIG, RECORD
from ..sources.resolve import PLAIN_SIDE_FILES, TEMPLATES
from ..sources.safetensors_store import INDEX, WEIGHTS

_NAMES = {CONFIG, WEIGHTS, INDEX, RECORD, TEMPLATES, "training.json", "evaluation.json", *PLAIN_SIDE_FILES}
"""Training and scores are of the weights beside them, and go with these."""
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def model_files(folder: Path) -> set[str]:
    """Names of the files that go when another model takes this one's place."""
    weights = _object(_read(folder / INDEX).get("weight_map"))
    own = _NAMES | {str(file) for file in weights.values()} | _code(folder)
    return {name for name in os.listdir(folder) if name in own or _SHARD.fullmatch(name)}


def _code(folder: Path) -> set[str]:
    """The Python files that config.json names, and what these import from beside them."""
    found: set[str] = set()
    for reference in _object(_read(folder / CONFIG).get("auto_map")).values():
        module = folder / f"{str(reference).split('--')[-1].split('.')[0]}.py"
        if module.is_file() and module.name not in found:
            found.add(module.name)
            try:
                found.update(Path(file).name for file in get_relative_import_files(module))
            except (OSError, ValueError):  # a file is missing or no text
                continue
    return found


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is none."""
    try:
        return _object(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return {}


def _object(content: Any) -> dict[str, Any]:
    return content if isinstance(content, dict) else {}
