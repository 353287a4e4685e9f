"""Checks whether a model folder can be published, without running any code in it."""

import json
import os
import pickletools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import get_token
from safetensors import SafetensorError, safe_open

from crosshead.common.errors import CardError, FolderError
from crosshead.common.model_location import expand_home, foreign_link

from .card import README, check_card
from .facts import CONFIG, read_json
from .tasks import task_of

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SENTENCEPIECE = ("tokenizer.model", "spiece.model")
TOKENIZERS = ({"tokenizer.json"}, *({name} for name in SENTENCEPIECE), {"vocab.json", "merges.txt"})
"""Sets of tokenizer files: the folder of a text model needs one complete set."""
IMAGE_PROCESSOR = "preprocessor_config.json"
"""File that a vision model needs instead of a tokenizer."""
VOCABULARIES = {"tokenizer.json", "vocab.json", "vocab.txt", "merges.txt"}
"""Files that list tokens; a token may look like a path, so paths are not searched for in them."""
PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".dill", ".npy", ".npz", ".h5", ".msgpack"}
"""Suffixes of files that can run code when loaded, or that hold weights in formats other than safetensors."""
BINARY = {".png", ".jpg", ".jpeg", ".gif", ".webp"}
"""Suffixes of images, which a card may show."""
PICKLED = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")
"""First bytes of pickles (protocols 2 to 5), and of the zip archives in which torch stores pickles."""
CALLS = {"GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "REDUCE", "BUILD", "EXT1", "EXT2", "EXT4"}
"""Pickle opcodes that can run code."""
ROOTS = (
    r"(?:home|Users|root|opt|work|workspace|mnt|srv|scratch|tmp|var|data|private|media|Volumes|lustre|gpfs|nfs|beegfs|"
    r"fsx|efs|raid|nvme|ssd|dbfs|content|kaggle)\d*"
)
"""Matches the first directory of an absolute path on a training machine."""
PATH = re.compile(
    rf"(?<![\w.:/}})\]>~-])(?:file://)?/{ROOTS}/[\w.@-]+|"
    r"(?<![\w/])[A-Za-z]:(?:\\+[\w. -]+\\|/+(?:Users|Windows|Program Files)/)"
)
"""Matches an absolute path of Linux, macOS or Windows within a text."""
WHOLE_PATH = re.compile(r"(?:/[\w.@+-]+){2,}/?")
"""Matches a JSON string that is an absolute path as a whole."""
SECRETS = re.compile(r"(?:TOKEN|SECRET|PASSWORD|API_?KEY|ACCESS_KEY)$")
"""Matches the end of the name of an environment variable that holds a secret."""
MINIMUM_SECRET = 12
"""Minimum characters of a secret to search for; shorter ones would match ordinary text."""


@dataclass(frozen=True)
class Private:
    """Private data that no published file may contain."""

    token: re.Pattern[str]
    """Matches access tokens."""
    secrets: Sequence[str]
    """The Hub token of the user, and secrets from environment variables."""
    directories: Sequence[str]
    """Directories of this machine."""


def check_folder(folder: Path, token: re.Pattern[str]) -> dict[str, int]:
    """The files to publish, name -> bytes; `FolderError` if a file is missing or must not be published.

    `token` matches access tokens.
    """
    if not (folder / CONFIG).is_file():
        raise FolderError(f"{folder} is not a model directory: {CONFIG} is missing")
    files = _files(folder)
    try:
        config = read_json(folder / CONFIG)
        _check_complete(folder, config, files)
        private = Private(token, _secrets(), _directories(folder))
        for name in files:
            _check_file(folder / name, name, private)
        check_card((folder / README).read_text(encoding="utf-8"), folder / README)
    except CardError as error:
        raise FolderError(str(error)) from error
    except OSError as error:
        raise FolderError(f"{error.filename} cannot be read: {error.strerror}") from error
    return files


def _files(folder: Path) -> dict[str, int]:
    """Name in the repository -> bytes, for all files of the folder."""
    sizes = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if any(part.startswith(".") for part in Path(name).parts) and name != ".gitattributes":
            raise FolderError(f"{folder} contains the hidden file {name}: remove or rename it")
        if path.is_symlink() and not path.is_file():
            kind = "link to a folder" if path.is_dir() else "broken link"
            raise FolderError(f"{folder} contains the {kind} {name}: replace it by a copy")
        if (target := foreign_link(path, folder)) is not None:
            raise FolderError(f"{folder} contains the link {name} to {target}: replace it by the file")
        if path.is_file():
            sizes[name] = path.stat().st_size
    return sizes


def _check_complete(folder: Path, config: Mapping[str, Any], files: Mapping[str, int]) -> None:
    weights = {name for name in files if name.endswith(".safetensors") and "/" not in name}
    if INDEX in files:
        placed = read_json(folder / INDEX).get("weight_map")
        if not isinstance(placed, dict) or not placed:
            raise FolderError(f"{folder / INDEX} lists no tensors: save the model again")
        needed = set(placed.values())
    else:
        placed, needed = None, {WEIGHTS}
    _check_names(folder, needed - weights, weights - needed)
    held = {name: shard for shard in sorted(needed) for name in _opened(folder / shard)[0]}
    if placed is not None and held != placed:
        name = min(set(held.items()) ^ set(placed.items()))[0]
        raise FolderError(f"{folder}: {INDEX} and the shards differ in the tensor {name}: save the model again")
    if task_of(config).reads_images:
        if IMAGE_PROCESSOR not in files:
            raise FolderError(f"{folder} has no image processor ({IMAGE_PROCESSOR}): copy the file into it")
    elif not any(needed <= files.keys() for needed in TOKENIZERS):
        raise FolderError(f"{folder} has no tokenizer (tokenizer.json is missing): copy the tokenizer's files into it")
    for entry in dict(config.get("auto_map") or {}).values():
        code = f"{str(entry).split('--')[-1].split('.')[0]}.py"
        if code not in files:
            raise FolderError(
                f"{folder} has no {code}, which config.json refers to: save the model with crosshead again"
            )
    if README not in files:
        raise FolderError(f"{folder} has no model card: write it with `crosshead card {folder}`")


def _check_names(folder: Path, missing: set[str], unused: set[str]) -> None:
    if missing:
        raise FolderError(f"{folder} is incomplete: {min(missing)} is missing")
    if unused:
        raise FolderError(f"{folder} contains {min(unused)}, which is not a part of the model: remove it")


def _opened(path: Path) -> tuple[set[str], dict[str, str]]:
    """The tensor names and the metadata of a shard; safetensors checks that the file size matches the header."""
    try:
        with safe_open(path, "np") as file:
            return set(file.keys()), file.metadata() or {}
    except SafetensorError as error:
        raise FolderError(f"{path} is damaged: {error}") from error


def _check_file(path: Path, name: str, private: Private) -> None:
    if path.suffix == ".safetensors":
        metadata = json.dumps(_opened(path)[1], ensure_ascii=False)
        _check_text(path, metadata, private)
        _check_paths(path, metadata, is_json=True)
        return
    raw = path.read_bytes()
    if path.suffix.lower() in PICKLES or _is_pickle(raw):
        raise FolderError(f"{path} may be a pickle, which can run code when it is loaded: remove it")
    if name in SENTENCEPIECE or path.suffix.lower() in BINARY:
        _check_text(path, raw.decode("latin-1"), replace(private, directories=()))
        return
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FolderError(f"{path} is neither text nor safetensors: remove it") from error
    _check_text(path, text, replace(private, directories=()) if name in VOCABULARIES else private)
    if name not in VOCABULARIES:
        _check_paths(path, text, is_json=path.suffix == ".json")


def _is_pickle(raw: bytes) -> bool:
    """True for a zip archive, any pickle of protocols 2 to 5, and an older pickle that can run code.

    Protocols 0 and 1 have no magic bytes, so their opcodes are parsed.
    """
    if raw.startswith(PICKLED):
        return True
    try:
        names = {code.name for code, _, _ in pickletools.genops(raw)}
    except Exception:  # not a pickle
        return False
    return not CALLS.isdisjoint(names)


def _check_text(path: Path, text: str, private: Private) -> None:
    """`FolderError` if the text contains private data; the message does not show the secret."""
    if private.token.search(text) or any(secret in text for secret in private.secrets):
        raise FolderError(f"{path} contains an access token: remove it and revoke the token")
    directory = next((directory for directory in private.directories if directory in text), None)
    if directory is not None:
        raise FolderError(f"{path} contains the path {directory!r} of this machine: remove it")


def _check_paths(path: Path, text: str, is_json: bool) -> None:
    match = PATH.search(text)
    value = match[0] if match else None
    if value is None and is_json:
        value = next((text for text in _strings(_parsed(path, text)) if WHOLE_PATH.fullmatch(text)), None)
    if value is not None:
        raise FolderError(f"{path} contains the absolute path {value!r}: remove it")


def _parsed(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FolderError(f"{path} is not JSON: {' '.join(str(error).split())[:100]}") from error


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _strings(part)


def _directories(folder: Path) -> list[str]:
    """The directories of the model, of this process and of the user, at least two levels below the root."""
    directories = {folder.resolve(), folder.resolve().parent, Path.cwd(), expand_home("~")}
    return sorted(str(directory) for directory in directories if len(directory.parts) > 2)


def _secrets() -> list[str]:
    """The Hub token of the user, and the secrets in environment variables."""
    secrets = {value for name, value in os.environ.items() if SECRETS.search(name)} | {get_token() or ""}
    return sorted(secret for secret in secrets if len(secret) >= MINIMUM_SECRET)
