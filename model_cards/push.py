"""Uploads a model folder to the Hub.

`upload_folder` makes one commit (several for a very large folder, each with complete files) and skips files that the
Hub already has. The Hub stores uploaded files by hash, so a second call after a failure continues the upload. The
older `upload_large_folder` is deprecated and missing in version 2 of the client.
"""

import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import TypeVar

from huggingface_hub import HfApi, ModelCard, RepoUrl
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from .card import README

MESSAGE = "Upload the model with crosshead"
MODEL_FILES = re.compile(
    r"""
    (model|adapter_model)(-\d{5}-of-\d{5})?\.safetensors | model\.safetensors\.index\.json
    | adapter_config\.json | adapter_model\.bin
    | (tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template|generation_config)\.json
    | (tokenizer|spiece)\.model | vocab\.txt | merges\.txt
    | chat_template\.jinja | additional_chat_templates/[^/]+\.jinja
    | (conversion|training|evaluation)\.json
    | (configuration|modeling)_crosshead\.py
    """,
    re.VERBOSE,
)
"""Matches the names of repository files that loaders or `crosshead card` read as part of the model."""
WAITS = (2.0, 10.0)
"""Seconds before each retry after a failure of the Hub or the connection."""
_EXPLANATIONS: dict[type[Exception], str] = {
    HFValidationError: "is not a valid Hub id: use one such as organisation/model",
    OfflineModeIsEnabled: "cannot be reached: HF_HUB_OFFLINE is set",
    RepositoryNotFoundError: "cannot be written: log in with `hf auth login` as a user with write access",
}
"""Error of the Hub's client -> end of the message for the user."""
Answer = TypeVar("Answer")


class PushError(ValueError):
    """A model cannot be pushed; the folder is unchanged."""


@dataclass(frozen=True)
class Pushed:
    """A model on the Hub."""

    address: RepoUrl
    """URL of the repository; also holds the full repository id."""
    commit: str
    """Hash of the commit that has all files of the folder."""
    private: bool
    """True if the repository is private. An existing repository keeps its visibility."""


def push(folder: Path, repository: str, private: bool = True, names: Collection[str] | None = None) -> Pushed:
    """Upload all files of the folder, or only those with `names`; create the repository if it does not exist.

    With `private`, an existing public repository is an error. Model files in the repository that the folder lacks,
    such as weights, a chat template or the configuration of an adapter, are deleted, because loaders would read them;
    other files stay. Uses the access token that the Hub's client finds.
    """
    api = HfApi()
    try:
        _check_on_the_hub(folder / README)
        created = _retry(lambda: api.create_repo(repository, private=private, exist_ok=True))
        is_private = bool(_retry(lambda: api.model_info(created.repo_id)).private)
        if private and not is_private:
            raise PushError(f"{repository} already exists and is public: choose another name, or add --public")
        return Pushed(created, _retry(lambda: _upload(api, folder, created.repo_id, names)), is_private)
    except PushError:
        raise
    except Exception as error:  # the HTTP library's own errors differ between versions of the Hub's client
        raise PushError(f"{repository} {_explained(error)}") from error


def tag(pushed: Pushed, name: str) -> str | None:
    """Tag the pushed commit. If another commit has this tag, return that commit and change nothing."""
    api, repository, commit = HfApi(), pushed.address.repo_id, pushed.commit
    try:
        refs = _retry(lambda: api.list_repo_refs(repository))
        taken = {ref.name: ref.target_commit for ref in refs.tags}.get(name)
        if taken is None:
            _retry(lambda: api.create_tag(repository, tag=name, revision=commit, exist_ok=True))
        return None if taken in (None, commit) else taken
    except Exception as error:  # as in push()
        raise PushError(f"{repository} {_explained(error)}") from error


def _check_on_the_hub(path: Path) -> None:
    """Let the Hub validate the metadata of the card before the repository is created."""
    if not path.is_file():
        return
    try:
        _retry(ModelCard(path.read_text(encoding="utf-8"), ignore_metadata_errors=True).validate)
    except ValueError as error:
        if isinstance(error, HfHubHTTPError | HFValidationError):
            raise
        raise PushError(f"the Hub rejects the metadata of {path}: {' '.join(str(error).split())[:300]}") from error


def _upload(api: HfApi, folder: Path, repository: str, names: Collection[str] | None) -> str:
    """Upload the files, delete other model files in the repository, and return the hash of the commit."""
    local = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    remote = [name for name in api.list_repo_files(repository) if MODEL_FILES.fullmatch(name)]
    old = [escape(name) for name in remote if name not in local]
    uploaded = None if names is None else [escape(name) for name in names]
    done = api.upload_folder(
        repo_id=repository,
        folder_path=folder,
        commit_message=MESSAGE,
        allow_patterns=uploaded,
        delete_patterns=old,
    )
    return done.oid


def _retry(call: Callable[[], Answer]) -> Answer:
    """Call the Hub, and retry after temporary errors. Every call in this module is safe to repeat."""
    for wait in WAITS:
        try:
            return call()
        except Exception as error:  # as in push()
            if not _is_temporary(error):
                raise
            time.sleep(wait)
    return call()


def _is_temporary(error: Exception) -> bool:
    """True if the error comes from the Hub or the connection, not from the request."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    return type(error).__module__.startswith(("httpx", "httpcore", "requests")) or isinstance(error, ConnectionError)


def _explained(error: Exception) -> str:
    """The end of the message for an error, without the error's own text, which may contain signed URLs."""
    for kind, explanation in _EXPLANATIONS.items():
        if isinstance(error, kind):
            return explanation
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if status in (401, 403):
        return f"cannot be written ({status}): log in with `hf auth login` as a user with write access"
    reason = status or getattr(error, "strerror", None) or type(error).__name__
    return f"cannot be written ({reason}): check the connection and the disk"
