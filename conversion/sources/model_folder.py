"""The files of a model folder apart from the weights: config, tokenizer, code, and the record of the conversion."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from platform import python_version
from typing import Any

import torch
import transformers
from transformers.dynamic_module_utils import get_relative_import_files

from crosshead.common.access_tokens import leave_out_tokens, without_tokens
from crosshead.common.checked_json import read_object
from crosshead.common.errors import ConversionError
from crosshead.common.model_location import LICENCE_FILES, LOADER_STATE
from crosshead.modeling.bundle import code_files

from ..architectures.families import kind_of
from ..architectures.saved_config import saved_config
from ..writing.shard_writer import digest_of
from ..writing.work_folder import is_fixed
from .safetensors_store import INDEX, WEIGHTS
from .tensor_store import TensorStore

CONFIG, RECORD, GENERATION_CONFIG = "config.json", "conversion.json", "generation_config.json"
FOLDERS = {"additional_chat_templates": ".jinja", "1_Pooling": ".json"}
"""Folders that a conversion copies -> the suffix of all their files. `1_Pooling` belongs to sentence-transformers."""
MAX_CONFIG_BYTES = 10_000_000
IMAGE_PROCESSOR = "preprocessor_config.json"
MODULES = "modules.json"
"""The list of modules of a sentence-transformers model, which also uses the files with "sentence" in their names."""
COPIED_MODULES = {"Transformer", "Pooling", "Normalize"}
"""Supported modules of sentence-transformers: a conversion copies their files, or they have none."""
VOCABULARIES = {"tokenizer.json", "vocab.json", "added_tokens.json"}
"""JSON files with vocabulary entries, some of which may look like access tokens."""
PLAIN_SIDE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    GENERATION_CONFIG,
    IMAGE_PROCESSOR,
    MODULES,
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    *LICENCE_FILES,
)
"""Names of the files that a conversion copies."""
PLACES = ("name_or_path", "special_tokens_map_file", "tokenizer_file")
"""Entries of tokenizer_config.json with places on the machine where the tokenizer was saved; nothing reads them."""
_MODEL_FILES = {CONFIG, WEIGHTS, INDEX, RECORD, *FOLDERS, "training.json", "evaluation.json", *PLAIN_SIDE_FILES}
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
Advance = Callable[[int], None]
"""Progress callback, called with the size in bytes of each tensor after it was read."""


def model_files(folder: Path) -> set[str]:
    """Return the names of a folder's files that belong to the model; others, such as a model card, are the user's."""
    weights = _object(_read_json(folder / INDEX).get("weight_map"))
    shards = {str(file) for file in weights.values() if str(file).endswith(".safetensors")}
    names = _MODEL_FILES | shards | _remote_code(folder)
    return {name for name in os.listdir(folder) if name in names or _SHARD.fullmatch(name)}


def _remote_code(folder: Path) -> set[str]:
    """Return the names of the Python files that `auto_map` in the settings names, and of their relative imports."""
    names: set[str] = set()
    for reference in code_references(folder):
        module = folder / f"{reference.split('--')[-1].split('.')[0]}.py"
        if module.is_file() and module.name not in names:
            names.add(module.name)
            try:
                names.update(Path(file).name for file in get_relative_import_files(module))
            except (OSError, ValueError):  # a file is missing or is not text
                continue
    return names


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file is missing or contains something else."""
    if not path.is_file():
        return {}
    try:
        return _object(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return {}


def _object(content: Any) -> dict[str, Any]:
    return content if isinstance(content, dict) else {}


def copy_files(files: list[Path], folder: Path) -> None:
    """Copy the source's tokenizer and other side files, including folders."""
    for file in files:
        if file.is_dir():  # the modes of files and folders are not copied: a source may be read-only
            (folder / file.name).mkdir(exist_ok=True)
            copy_files(list(file.iterdir()), folder / file.name)
        else:
            shutil.copyfile(file, folder / file.name)


def remove_loading_arguments(folder: Path) -> None:
    """Remove loading arguments that transformers saved in tokenizer_config.json: they would apply to every user.

    Places on another machine, and references to the tokenizer's own code, which is not copied, are removed as well.
    """
    path = folder / "tokenizer_config.json"
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    cleaned = {name: value for name, value in content.items() if name not in (*LOADER_STATE, *PLACES, "auto_map")}
    if cleaned != content:
        write_json(path, cleaned)


def add_legacy_fields(path: Path, config: Any) -> None:
    """Add the field names of transformers 4 to a stock config.json.

    transformers 4 ignores the new names and would use the defaults of its own fields.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    older = {"torch_dtype": content["dtype"]} if "dtype" in content else {}
    if hasattr(config, "rope_parameters"):
        rope = dict(config.rope_parameters)
        older |= {name: getattr(config, name) for name in config.attribute_map}
        older["rope_theta"] = rope.pop("rope_theta")
        if rope["rope_type"] != "default":
            older["rope_scaling"] = rope
    # T5 1.1: transformers 4 scales the decoder's outputs if weights are tied.
    if getattr(config, "scale_decoder_outputs", None) is False:
        older["tie_word_embeddings"] = False
    write_json(path, dict(sorted((content | older).items())))


def remove_access_tokens(config: Mapping[str, Any], folder: Path) -> dict[str, list[str]]:
    """Remove access tokens from the JSON files in `folder`, and return the removed keys by file.

    `config` is the source's config: its tokens are reported as removed, although the target's config never had them.
    """
    files = sorted(file for file in folder.glob("*.json") if file.name not in VOCABULARIES)
    removed = {CONFIG: without_tokens(config)[1]} | leave_out_tokens(files)
    return {file: names for file, names in removed.items() if names}


def code_references(folder: Path) -> list[str]:
    """Return the references to code in a folder's settings; loading runs this code, from the folder or elsewhere."""
    references = []
    for name in (CONFIG, "tokenizer_config.json", IMAGE_PROCESSOR, "processor_config.json"):
        for value in _object(_read_json(folder / name).get("auto_map")).values():
            references += [str(part) for part in (value if isinstance(value, list) else [value]) if part is not None]
    return references


def foreign_code(folder: Path) -> str | None:
    """Return the first Python file or reference to code in a folder that is not crosshead's own; None if all are.

    A link to a folder, in which `rglob` does not search for code, also counts as foreign.
    """
    linked = next((path.name for path in sorted(folder.rglob("*")) if path.is_symlink() and path.is_dir()), None)
    if linked is not None:
        return f"the linked folder {linked}"
    files, references = sorted(folder.rglob("*.py")), code_references(folder)
    content = read_object(folder / CONFIG, MAX_CONFIG_BYTES, "a configuration") if files or references else {}
    own = code_files(saved_config(content, folder.name)) if kind_of(content) == "crosshead" else {}
    for file in files:
        if not file.is_file() or own.get(file.name) != file.read_text(encoding="utf-8", errors="replace"):
            return file.name
    return next((name for name in references if "--" in name or f"{name.split('.')[0]}.py" not in own), None)


def write_json(path: Path, content: Mapping[str, Any] | list[str]) -> None:
    """Write an indented JSON file atomically."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # it may be a link to another file
    # a lone surrogate, as in a file name that is not UTF-8, becomes its JSON escape
    try:
        partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8", "backslashreplace")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def record_file(folder: Path, stock: bool) -> Path:
    """Return the path of a conversion's record: in a crosshead model's folder, or next to a stock model's folder.

    If nothing can be written next to the folder of a stock model, its record is in the folder.
    """
    folder = Path(os.path.abspath(folder))
    return folder.with_name(f"{folder.name}.{RECORD}") if stock and not is_fixed(folder) else folder / RECORD


def check_record(folder: Path, overwrite: bool) -> None:
    """Refuse to replace the record of a stock model without `overwrite`."""
    path = record_file(folder, stock=True)
    if path.is_dir():
        raise ConversionError(f"{path} is a folder, but the record is written there: choose another place")
    if os.path.lexists(path) and not overwrite:
        raise ConversionError(f"{path} is already there: choose another place, or replace it with --overwrite")


def read_record(path: Path) -> dict[str, Any]:
    """Return the record of a conversion; empty if the file is missing. `ConversionError` for any other file."""
    if not path.exists():
        return {}
    content = _read_json(path)
    if not _is_record(content):
        raise ConversionError(
            f"{path} is not a complete record of a conversion: restore it, or remove it to compare without it"
        )
    return content


def _is_record(content: dict[str, Any]) -> bool:
    """True if all fields that `verify` reads are present and have the right types."""
    tolerance, tensors, source = content.get("tolerance", ""), content.get("tensors"), content.get("source")
    if tolerance is not None:
        if not isinstance(tolerance, dict) or tolerance.keys() != {"logits", "divergence"}:
            return False
        if not isinstance(tolerance["logits"], float | None) or not isinstance(tolerance["divergence"], float):
            return False
    if not isinstance(tensors, dict) or not isinstance(source, dict) or not {"name", "digest"} <= source.keys():
        return False
    return all(isinstance(tensor, dict) and "crc32" in tensor for tensor in tensors.values())


def versions() -> dict[str, str]:
    """Return the versions of the software that affects the result."""
    libraries = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"crosshead": version("crosshead"), "python": python_version(), **libraries}


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def store_digest(store: TensorStore, known: Mapping[str, str], advance: Advance = lambda size: None) -> str:
    """Return one SHA-256 of all tensors, independent of their shards; `known` digests are not computed again."""
    digests = stored_digests(store, known, advance)
    rows = sorted(store.entries.items())
    lines = [f"{name} {entry.dtype} {list(entry.shape)} {digests[name]}\n" for name, entry in rows]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def stored_digests(store: TensorStore, known: Mapping[str, str], advance: Advance) -> dict[str, str]:
    """Return the CRC-32 of every tensor, as `write_shard` computes it; `known` digests are not computed again."""
    digests = {}
    for name in chain.from_iterable(store.shards.values()):
        digests[name] = known.get(name) or digest_of(store.chunks(name))
        advance(store.entries[name].size)
    return digests
