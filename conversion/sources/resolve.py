"""Opens a checkpoint in a local folder, on the Hub or in a GGUF file, behind one interface."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crosshead.common.access_tokens import TOKEN, without_tokens
from crosshead.common.checked_json import read_object, shown
from crosshead.common.errors import ConversionError
from crosshead.common.posix import require_posix

from ..gguf.header import parts_of
from ..gguf.store import GgufStore, write_side_files
from .hub import fetch
from .model_folder import CONFIG, LARGEST_CONFIG, VOCABULARIES
from .safetensors_store import SafetensorsStore
from .tensor_store import TensorStore

TEMPLATES = "additional_chat_templates"
PLAIN_SIDE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    *(f"{name}{ending}" for name in ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY") for ending in ("", ".txt", ".md")),
)
"""Files of a checkpoint that are copied, by their names."""
_TEXTS = ("", ".md", ".txt", ".jinja")
_WORDS = {"vocab.txt", "merges.txt"}
_TOKENIZERS = ({"tokenizer.json"}, {"tokenizer.model"}, {"vocab.json", "merges.txt"})
"""The files of which a tokenizer can be made: one of these sets is enough."""


@dataclass(frozen=True)
class Source:
    """A checkpoint that can be converted."""

    store: TensorStore
    """Its tensors, under stock names."""
    config: dict[str, Any]
    """What its config.json says, or would say."""
    files: list[Path]
    """What is copied beside the weights: tokenizer, generation config, licence; and a folder of chat templates."""
    origin: dict[str, str]
    """How conversion.json names it, without a path of this machine."""
    fingerprint: str
    """Changes when the source does; cheap, so not a hash of all its bytes."""
    dropped: Mapping[str, str] = field(default_factory=dict)
    """Tensors that it holds under names of its own and `store` does not -> why."""


def open_source(source: str | Path, revision: str | None = None, *, scratch: Path, also: Sequence[str] = ()) -> Source:
    """Open a folder, a GGUF file, a folder with one, or a model on the Hub.

    `scratch` takes small files that are made of it; `also` names files to fetch from the Hub that no conversion reads.
    """
    require_posix("reading a checkpoint to convert or verify it")
    path = Path(os.path.expanduser(source))
    if os.path.exists(path) and source != "":
        if revision is not None:
            raise ConversionError(f"{source} is local and has no revisions: leave revision={revision!r} out")
        return _open_local(path, scratch)
    if isinstance(source, Path) or _looks_like_path(source):
        raise ConversionError(f"{shown(str(source))} does not exist: give a folder, a GGUF file or a name on the Hub")
    folder, commit = fetch(source, revision, [*PLAIN_SIDE_FILES, f"{TEMPLATES}/*.jinja", *also])
    return _open_folder(folder, source, {"kind": "hub", "name": source, "revision": commit})


def _looks_like_path(source: str) -> bool:
    return not source or source[0] in "./~" or "\\" in source or source.count("/") > 1 or source.endswith(".gguf")


def _open_local(path: Path, scratch: Path) -> Source:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConversionError(f"{path} is a single file, and no GGUF one: give the folder of the checkpoint")
        return _open_gguf(path, scratch)
    if (path / CONFIG).exists():
        return _open_folder(path, str(path), {"kind": "folder", "name": path.resolve().name})
    try:
        found = sorted(file for file in path.iterdir() if file.suffix == ".gguf")
    except OSError as error:
        raise ConversionError(f"{path} cannot be read: {error.strerror}") from error
    if not found:
        raise ConversionError(f"{path} has no {CONFIG}: give the folder of a checkpoint, or a GGUF file")
    if not set(found) <= set(parts_of(found[0])):
        names = ", ".join(file.name for file in found)
        raise ConversionError(f"{path} holds several GGUF files: give one of {names}")
    return _open_gguf(found[0], scratch)


def _open_folder(folder: Path, name: str, origin: dict[str, str]) -> Source:
    config = read_object(folder / CONFIG, LARGEST_CONFIG, "a configuration")
    files = side_files(folder)
    if not any(needed <= {file.name for file in files} for needed in _TOKENIZERS):
        raise ConversionError(f"{name} has no tokenizer (no tokenizer.json): copy the tokenizer's files into it")
    _check_tokens([folder / CONFIG, *files], name)
    store = SafetensorsStore(folder)
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return Source(store, config, files, origin, _digest(store.fingerprint(), config, states))


def _open_gguf(path: Path, scratch: Path) -> Source:
    store = GgufStore(path)
    write_side_files(store, scratch)
    origin, files = {"kind": "gguf", "name": path.name}, side_files(scratch)
    _check_tokens(files, str(path))
    return Source(store, store.config, files, origin, _digest(store.fingerprint()), store.dropped)


def side_files(folder: Path) -> list[Path]:
    """What belongs beside the weights, by an allow-list: neither code nor pickles nor the source's description."""
    files = [folder / name for name in PLAIN_SIDE_FILES if (folder / name).is_file()]
    templates = folder / TEMPLATES
    if templates.is_dir():
        for file in sorted(templates.iterdir()):
            if file.suffix != ".jinja":
                raise ConversionError(f"{file} is no chat template (*.jinja): remove it from {TEMPLATES}")
        files.append(templates)
    return files


def _check_tokens(files: Sequence[Path], name: str) -> None:
    """Licences and templates are copied as they are; of JSON files, values that hold a token can be left out."""
    texts = [each for file in files for each in (sorted(file.iterdir()) if file.is_dir() else [file])]
    for file in (file for file in texts if file.name not in VOCABULARIES | _WORDS):
        if file.suffix == ".json":
            text = json.dumps(without_tokens(read_object(file, LARGEST_CONFIG, "settings"))[0])
        else:
            text = file.read_text(encoding="utf-8", errors="replace") if file.suffix in _TEXTS else ""
        if TOKEN.search(text):
            raise ConversionError(
                f"{file.name} of {name} holds an access token: take it out, and have another one issued"
            )


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
