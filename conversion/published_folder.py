"""What lies beside the weights: configuration, code, tokenizer, and the record of how the model was made."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

from crosshead import modeling

from .shard_writer import digest_of
from .store import TensorStore

RECORD = "conversion.json"


def copy_files(files: list[Path], folder: Path) -> None:
    """The source's tokenizer and the like, by their names; a folder's files keep the folder."""
    for file in files:
        if file.is_dir():
            shutil.copytree(file, folder / file.name, dirs_exist_ok=True)
        else:
            shutil.copyfile(file, folder / file.name)


def code_files() -> list[Path]:
    """The files that load a model where crosshead is not installed."""
    return sorted(file for file in Path(str(modeling.__file__)).parent.glob("*.py") if file.name != "__init__.py")


def copy_code(folder: Path) -> None:
    """Put the code beside the weights."""
    for file in code_files():
        shutil.copyfile(file, folder / file.name)


def foreign_code(folder: Path) -> str | None:
    """The first file of code in a folder that this crosshead would not have put there."""
    own = {file.name: file.read_bytes() for file in code_files()}
    found = sorted(folder.rglob("*.py"))
    return next((file.name for file in found if own.get(file.name) != file.read_bytes()), None)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """One JSON document, readable, whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)


def read_record(folder: Path) -> dict[str, Any]:
    """What `conversion.json` says; nothing where there is none or it is no record of ours."""
    try:
        content = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if _is_record(content) else {}


def _is_record(content: Any) -> bool:
    """Whether it says at least what `verify` reads in it."""
    if not isinstance(content, dict) or not isinstance(content.get("tolerance", ""), float | None):
        return False
    tensors, source = content.get("tensors"), content.get("source")
    if not isinstance(tensors, dict) or not isinstance(source, dict) or not {"name", "digest"} <= source.keys():
        return False
    return all(isinstance(tensor, dict) and "crc32" in tensor for tensor in tensors.values())


def versions() -> dict[str, str]:
    """What the result depends on besides source and options."""
    return {"crosshead": version("crosshead"), "torch": torch.__version__, "transformers": transformers.__version__}


def file_digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def store_digest(store: TensorStore, known: Mapping[str, str]) -> str:
    """One hash of all tensors, however they are spread over files; `known` holds those already hashed."""
    lines = []
    for name, entry in sorted(store.entries.items()):
        digest = known.get(name) or stored_digest(store, name)
        lines.append(f"{name} {entry.dtype} {list(entry.shape)} {digest}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def stored_digest(store: TensorStore, name: str) -> str:
    """One tensor's digest, as the writer of shards makes it."""
    return digest_of(store.chunks(name))
