"""The files beside the weights: configuration, code, tokenizer, and the record of the conversion."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from platform import python_version
from typing import Any

import torch
import transformers

from crosshead.common.access_tokens import leave_out_tokens, without_tokens
from crosshead.common.checked_json import read_object
from crosshead.common.errors import ConversionError
from crosshead.common.tokenizer_state import LOADING
from crosshead.modeling.bundle import code_files

from ..architectures.families import kind_of, read_config
from ..writing.shard_writer import digest_of
from ..writing.work_folder import is_fixed
from .tensor_store import TensorStore

CONFIG, RECORD = "config.json", "conversion.json"
LARGEST_CONFIG = 10_000_000
TOKENIZER = "tokenizer_config.json"
VOCABULARIES = {"tokenizer.json", "vocab.json", "added_tokens.json"}
"""JSON files of words, any of which may look like anything."""
Advance = Callable[[int], None]
"""Told the bytes of each tensor that was read."""


def copy_files(files: list[Path], folder: Path) -> None:
    """The source's tokenizer and the like, by their names; a folder's files keep the folder."""
    for file in files:
        if file.is_dir():
            shutil.copytree(file, folder / file.name, dirs_exist_ok=True)
        else:
            shutil.copyfile(file, folder / file.name)


def forget_loading(folder: Path) -> None:
    """Leave out of the tokenizer's settings how somebody once loaded it, which would hold for all who load it."""
    path = folder / TOKENIZER
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    kept = {name: value for name, value in content.items() if name not in LOADING}
    if kept != content:
        write_json(path, kept)


def add_older_names(path: Path, config: Any) -> None:
    """Say in a stock config.json what has new names as transformers 4 reads it, too: it takes defaults else."""
    rope = dict(config.rope_parameters)
    older = {name: getattr(config, name) for name in config.attribute_map} | {"rope_theta": rope.pop("rope_theta")}
    if rope["rope_type"] != "default":
        older["rope_scaling"] = rope
    write_json(path, dict(sorted((json.loads(path.read_text(encoding="utf-8")) | older).items())))


def drop_tokens(config: Mapping[str, Any], folder: Path) -> dict[str, list[str]]:
    """Leave access tokens of a source's config, and of what was copied, out of the result; the names of what went."""
    files = sorted(file for file in folder.glob("*.json") if file.name not in VOCABULARIES)
    gone = {CONFIG: without_tokens(config)[1]} | leave_out_tokens(files)
    return {file: names for file, names in gone.items() if names}


def foreign_code(folder: Path) -> str | None:
    """The first file of code in a folder that this crosshead would not have written there."""
    found = sorted(folder.rglob("*.py"))
    own = own_code(folder) if found else {}
    texts = ((file.name, file.read_text(encoding="utf-8", errors="replace")) for file in found)
    return next((name for name, text in texts if own.get(name) != text), None)


def own_code(folder: Path) -> dict[str, str]:
    """The code that this crosshead would have written for the configuration there; none where that is not ours."""
    content = read_object(folder / CONFIG, LARGEST_CONFIG, "a configuration")
    return code_files(read_config(content, "mixed", folder.name)) if kind_of(content) == "mixed" else {}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """One JSON document, readable, whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)


def record_file(folder: Path, stock: bool) -> Path:
    """Where the record of a conversion is: in a crosshead model, but beside a stock one, which is nothing of ours.

    Inside that one, too, where nothing can be prepared beside it.
    """
    place = Path(os.path.abspath(folder))
    return place.with_name(f"{place.name}.{RECORD}") if stock and not is_fixed(place) else place / RECORD


def check_record(folder: Path, overwrite: bool) -> None:
    """Refuse to replace the record beside a stock model, unless told to."""
    path = record_file(folder, stock=True)
    if path.is_dir():
        raise ConversionError(f"{path}, where the record would go, is a folder: choose another place")
    if os.path.lexists(path) and not overwrite:
        raise ConversionError(f"{path} is already there: choose another place, or replace it with --overwrite")


def read_record(path: Path) -> dict[str, Any]:
    """What the record of a conversion says; nothing where there is none or it is no record of ours."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if _is_record(content) else {}


def _is_record(content: Any) -> bool:
    """Whether it says at least what `verify` reads in it."""
    if not isinstance(content, dict) or not _is_tolerance(content.get("tolerance", "")):
        return False
    tensors, source = content.get("tensors"), content.get("source")
    if not isinstance(tensors, dict) or not isinstance(source, dict) or not {"name", "digest"} <= source.keys():
        return False
    return all(isinstance(tensor, dict) and "crc32" in tensor for tensor in tensors.values())


def _is_tolerance(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, dict) or value.keys() != {"logits", "divergence"}:
        return False
    return isinstance(value["logits"], float | None) and isinstance(value["divergence"], float)


def versions() -> dict[str, str]:
    """What the result depends on besides source and options."""
    libraries = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"crosshead": version("crosshead"), "python": python_version(), **libraries}


def file_digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def store_digest(store: TensorStore, known: Mapping[str, str], advance: Advance = lambda size: None) -> str:
    """One hash of all tensors, however they are spread over files; `known` holds those already hashed."""
    digests = stored_digests(store, known, advance)
    rows = sorted(store.entries.items())
    lines = [f"{name} {entry.dtype} {list(entry.shape)} {digests[name]}\n" for name, entry in rows]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def stored_digests(store: TensorStore, known: Mapping[str, str], advance: Advance) -> dict[str, str]:
    """Every tensor's digest, as the writer of shards makes it, read in the order of the files."""
    digests = {}
    for name in chain.from_iterable(store.shards.values()):
        digests[name] = known.get(name) or digest_of(store.chunks(name))
        advance(store.entries[name].size)
    return digests
