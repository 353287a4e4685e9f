"""Opens a checkpoint in a local folder, on the Hub or in a GGUF file as a `Source`."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, is_offline_mode, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from crosshead.common.access_tokens import TOKEN, without_tokens
from crosshead.common.checked_json import quoted, read_object
from crosshead.common.errors import ConversionError, one_line, temporary_files
from crosshead.common.model_location import ADAPTER, MERGE_ADAPTER, expand_home, foreign_link, split_revision
from crosshead.common.posix import require_posix

from ..architectures.families import FAMILIES, PREFIX, check_family, kind_of
from ..gguf.header import part_paths
from ..gguf.store import GgufStore, write_side_files
from .model_folder import (
    CONFIG,
    COPIED_MODULES,
    FOLDERS,
    IMAGE_PROCESSOR,
    MAX_CONFIG_BYTES,
    MODULES,
    PLAIN_SIDE_FILES,
    VOCABULARIES,
)
from .safetensors_store import INDEX, WEIGHTS, SafetensorsStore, read_index
from .tensor_store import TensorStore

_TEXT_SUFFIXES = ("", ".md", ".txt", ".jinja")
_TEXT_VOCABULARIES = {"vocab.txt", "merges.txt"}
_TOKENIZERS = ({"tokenizer.json"}, {"tokenizer.model"}, {"spiece.model"}, {"vocab.json", "merges.txt"})
"""Sets of tokenizer files: a checkpoint must have all files of one set."""


@dataclass(frozen=True)
class Source:
    """A checkpoint that is converted or verified."""

    store: TensorStore
    """The tensors of the checkpoint, by stock names."""
    config: dict[str, Any]
    """The content of config.json; for a GGUF file, built from its metadata."""
    files: list[Path]
    """Paths of the files to copy: tokenizer, generation config, licence, and folders such as the chat templates'."""
    origin: dict[str, str]
    """Description of the source in conversion.json, without a path of this machine."""
    fingerprint: str
    """Hash that changes with the source. Cheap to compute: it depends on file times, not on all bytes."""
    dropped: Mapping[str, str] = field(default_factory=dict)
    """Name of a tensor of a GGUF file that is not in `store` -> the reason."""

    @property
    def label(self) -> str:
        """Name for messages: the user's path to a local source, or the name on the Hub."""
        return self.origin["name"] if self.origin["kind"] == "hub" else str(self.store.paths[0])


def open_source(
    source: str | Path, revision: str | None = None, *, scratch: Path, further_files: Sequence[str] = ()
) -> Source:
    """Open a folder, a GGUF file, a folder with one GGUF file, or a model on the Hub.

    Files made from a GGUF file are written to `scratch`. `further_files` names more files to download.
    """
    require_posix("reading a checkpoint to convert or verify it")
    path = expand_home(source)
    if os.path.exists(path) and source != "":
        if revision is not None:
            raise ConversionError(f"{source} is local and has no revisions: omit revision={revision!r}")
        return _open_local(path, scratch)
    if revision is None and isinstance(source, str):
        source, revision = split_revision(source)
    if isinstance(source, Path) or _looks_like_path(source):
        raise ConversionError(f"{quoted(str(source))} does not exist: give a folder, a GGUF file or a name on the Hub")
    in_folders = [f"{name}/*{ending}" for name, ending in FOLDERS.items()]
    folder, commit = _download(source, revision, [*PLAIN_SIDE_FILES, *in_folders, *further_files])
    return _open_folder(folder, source, {"kind": "hub", "name": source, "revision": commit})


def _looks_like_path(source: str) -> bool:
    return (
        not source or source[0] in "./~" or "\\" in source or source.count("/") > 1 or source.lower().endswith(".gguf")
    )


def _open_local(path: Path, scratch: Path) -> Source:
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ConversionError(f"{path} is a single file, but not a GGUF file: give the folder of the checkpoint")
        return _open_gguf(path, scratch)
    if (path / CONFIG).exists() or (path / ADAPTER).exists():
        return _open_folder(path, str(path), {"kind": "folder", "name": path.resolve().name})
    try:
        files = sorted(file for file in path.iterdir() if file.suffix.lower() == ".gguf")
    except OSError as error:
        raise ConversionError(f"{path} cannot be read: {error.strerror}") from error
    if not files:
        raise ConversionError(f"{path} has no {CONFIG}: give the folder of a checkpoint, or a GGUF file")
    if not set(files) <= set(part_paths(files[0])):
        names = ", ".join(file.name for file in files)
        raise ConversionError(f"{path} contains several GGUF files: give one of {names}")
    return _open_gguf(files[0], scratch)


def _open_folder(folder: Path, name: str, origin: dict[str, str]) -> Source:
    config = _supported_config(folder, name)
    files = _side_files(folder)
    _check_inputs(config, {file.name for file in files}, name)
    _check_tokens([folder / CONFIG, *files], name)
    is_encoder = FAMILIES[config["model_type"].removeprefix(PREFIX)].is_encoder
    store = SafetensorsStore(folder, base="" if is_encoder else "model.")
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return Source(store, config, files, origin, _digest(store.fingerprint(), config, states))


def _supported_config(folder: Path, name: str) -> dict[str, Any]:
    """Return the content of config.json; `ConversionError` for a model that cannot be converted or verified."""
    if (folder / ADAPTER).exists():  # transformers would add the adapter to the weights
        raise ConversionError(f"{name} has an adapter of peft ({ADAPTER}), which would be left out: {MERGE_ADAPTER}")
    config = read_object(folder / CONFIG, MAX_CONFIG_BYTES, "a configuration")
    if "_class_name" in config:
        raise ConversionError(f"{name} is a model of diffusers: add mechanisms in Python, with from_transformer")
    check_family(config, kind_of(config), name)
    return config


def _check_inputs(config: Mapping[str, Any], files: set[str], name: str) -> None:
    """Refuse a folder without a tokenizer, or without an image processor if its model reads images."""
    if FAMILIES[config["model_type"].removeprefix(PREFIX)].reads_images:
        if IMAGE_PROCESSOR not in files:
            raise ConversionError(f"{name} has no image processor ({IMAGE_PROCESSOR}): copy the file into it")
    elif not any(needed <= files for needed in _TOKENIZERS):
        remedy = "copy the tokenizer's files into it; a tokenizer with code of its own is not supported"
        if "vocab.txt" in files:
            remedy = "make one from its vocab.txt, with AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        raise ConversionError(f"{name} has no tokenizer (no tokenizer.json): {remedy}")


def _open_gguf(path: Path, scratch: Path) -> Source:
    store = GgufStore(path)
    with temporary_files():
        write_side_files(store, scratch)
    origin, files = {"kind": "gguf", "name": path.name}, _side_files(scratch)
    _check_tokens(files, str(path))
    return Source(store, store.config, files, origin, _digest(store.fingerprint()), store.dropped)


def _side_files(folder: Path) -> list[Path]:
    """Return the files to copy, by an allow-list: no code, no pickles, no model card."""
    files = [folder / name for name in PLAIN_SIDE_FILES if (folder / name).is_file()]
    linked = list(files)
    for name, ending in FOLDERS.items():
        if (folder / name).is_dir():
            for file in sorted((folder / name).iterdir()):
                if file.suffix != ending or not file.is_file():
                    raise ConversionError(f"{file} is not a {ending} file: remove it from {name}")
                linked.append(file)
            files.append(folder / name)
    if (folder / MODULES).is_file():
        _check_modules(folder / MODULES)
    for file in (*linked, *files):
        if (target := foreign_link(file, folder)) is not None:
            raise ConversionError(f"{file} is a link to {target}, which would be copied: replace it by the file")
    return files


def _check_modules(path: Path) -> None:
    """Refuse a sentence-transformers model with modules whose files are not copied."""
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
        kinds = [str(module["type"]).rsplit(".", 1)[-1] for module in modules if "type" in module]
    except (ValueError, TypeError) as error:
        raise ConversionError(f"{path} is not a list of modules: {one_line(error)}") from None
    for kind in kinds:
        if kind not in COPIED_MODULES:
            raise ConversionError(
                f"{path} names a module {kind}, which a conversion does not copy: convert the transformer without "
                f"{MODULES}, and add the module to the result"
            )


def _check_tokens(files: Sequence[Path], name: str) -> None:
    """Refuse access tokens in text files; from JSON objects, they are removed when the files are copied."""
    texts = [text_file for file in files for text_file in (sorted(file.iterdir()) if file.is_dir() else [file])]
    for file in texts:
        if file in files and file.name in VOCABULARIES | _TEXT_VOCABULARIES:
            continue
        if file.suffix == ".json" and file.name != MODULES:
            text = json.dumps(without_tokens(read_object(file, MAX_CONFIG_BYTES, "settings"))[0])
        else:
            is_text = file.suffix in _TEXT_SUFFIXES or file.name == MODULES
            text = file.read_text(encoding="utf-8", errors="replace") if is_text else ""
        if TOKEN.search(text):
            raise ConversionError(
                f"{file.name} of {name} contains an access token: remove it from the file and revoke it"
            )


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


_HUB_ERRORS: dict[type[Exception], str] = {
    HFValidationError: "is not a valid name on the Hub either: give a path, or a name such as organisation/model",
    GatedRepoError: "is gated on the Hub: request access on its page and log in with `hf auth login`",
    RevisionNotFoundError: "has no revision {revision!r} on the Hub: give an existing branch, tag or commit",
    RepositoryNotFoundError: "is not on the Hub, or is private: check the name, or log in with `hf auth login`",
    LocalEntryNotFoundError: "is not complete in the local Hub cache, and the Hub is not reachable: go online, "
    "without HF_HUB_OFFLINE",
}
"""Exception of huggingface_hub, subclasses first -> the explanation in the message."""


def _download(repository: str, revision: str | None, side_files: list[str]) -> tuple[Path, str]:
    """Download config, `side_files` and safetensors of a model to the Hub's cache; return folder and commit."""
    try:
        if not is_offline_mode():
            _check_weights(repository, HfApi().list_repo_files(repository, revision=revision))
        small = [CONFIG, INDEX, ADAPTER, *side_files]
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=small))
        _supported_config(folder, repository)  # before the weights are downloaded
        snapshot_download(repository, revision=folder.name, allow_patterns=[WEIGHTS])
        files = [WEIGHTS]
        if not (folder / WEIGHTS).exists() and (folder / INDEX).exists():
            files = sorted(set(read_index(folder / INDEX).values()))  # shards may have any name
            snapshot_download(repository, revision=folder.name, allow_patterns=files)
        others = [file for file in folder.iterdir() if file.suffix in (".bin", ".gguf")]  # refused later
        if is_offline_mode() and not others and not all((folder / name).exists() for name in files):
            raise LocalEntryNotFoundError("a file with weights is missing")
    except ConversionError:
        raise
    except Exception as error:  # the exceptions of the HTTP library differ between versions of the Hub's client
        reason = _explain(error, revision)
        raise ConversionError(f"{quoted(repository)}, which is not a local folder, {reason}") from error
    return folder, folder.name


def _check_weights(repository: str, files: list[str]) -> None:
    if WEIGHTS in files or INDEX in files:
        return
    if any(file.endswith(".gguf") for file in files):
        raise ConversionError(f"{repository!r} contains only GGUF files: download one of them and give its path")
    raise ConversionError(
        f"{repository!r} has no {WEIGHTS}, and pickles (pytorch_model.bin) are not read because they can run code: "
        "look for a safetensors version of the model, or save one with transformers"
    )


def _explain(error: Exception, revision: str | None) -> str:
    """Return an explanation without the error's own text, which may contain signed URLs."""
    for kind, explanation in _HUB_ERRORS.items():
        if isinstance(error, kind):
            return explanation.format(revision=revision)
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if status in (401, 403):
        return f"is not accessible on the Hub ({status}): log in with `hf auth login` as a user with read access"
    reason = status or getattr(error, "strerror", None) or type(error).__name__
    return f"cannot be downloaded from the Hub ({reason}): check the connection and the disk, then try again"
