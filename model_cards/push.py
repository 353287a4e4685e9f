"""A model folder on its way to the Hub.

`upload_folder` does the transfer: it sends one commit (of very large folders several, each complete in its files),
skips what the Hub has, and, called again after a failure, goes on where it stopped, because the Hub keeps what was
sent by its hash. `upload_large_folder`, which also existed, is deprecated for it and gone from the client's version 2.
"""

import time
from collections.abc import Callable
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
WEIGHTS = "model*.safetensors*"
"""Names in the repository's root that belong to a model's weights, and their index."""
WAITS = (2.0, 10.0)
"""Seconds before another try, where the Hub or the connection failed."""
_EXPLANATIONS: dict[type[Exception], str] = {
    HFValidationError: "is no name for the Hub: use one such as organisation/model",
    OfflineModeIsEnabled: "cannot be reached: HF_HUB_OFFLINE is set",
    RepositoryNotFoundError: "cannot be written as nobody: log in with `hf auth login`, as somebody who may",
}
"""What a failure means."""
Answer = TypeVar("Answer")


class PushError(ValueError):
    """A model could not be pushed: the message says why; the folder is as it was."""


def push(folder: Path, repository: str, private: bool = True) -> RepoUrl:
    """Upload all that the folder holds; returns the address, which knows the repository's full name.

    The repository is made where it is missing. Who asks for a private one does not get an old one that all can read.
    Weights of an earlier model that the folder does not have are removed, as they would be loaded in place of these.
    The token is the one that the Hub's own client finds.
    """
    api = HfApi()
    try:
        _check_on_the_hub(folder / README)
        made = _again(lambda: api.create_repo(repository, private=private, exist_ok=True))
        public = private and not _again(lambda: api.model_info(made.repo_id)).private
        if not public:
            _again(lambda: _upload(api, folder, made.repo_id))
    except PushError:
        raise
    except Exception as error:  # the HTTP library's own errors differ between versions of the Hub's client
        raise PushError(f"{repository} {_explained(error)}") from error
    if public:
        raise PushError(f"{repository} is there already and public: choose another name, or say that it may be public")
    return made


def tag(repository: str, name: str) -> str | None:
    """Name what was pushed last; where another commit has the name, that one, and nothing is changed."""
    api = HfApi()
    try:
        commit = _again(lambda: api.model_info(repository)).sha
        refs = _again(lambda: api.list_repo_refs(repository))
        taken = {ref.name: ref.target_commit for ref in refs.tags}.get(name)
        if taken is None:
            _again(lambda: api.create_tag(repository, tag=name, revision=commit, exist_ok=True))
        return None if taken in (None, commit) else taken
    except Exception as error:  # as above
        raise PushError(f"{repository} {_explained(error)}") from error


def _check_on_the_hub(path: Path) -> None:
    """The Hub's own rules for the head of a card, before anything is made there."""
    if not path.is_file():
        return
    try:
        _again(ModelCard(path.read_text(encoding="utf-8"), ignore_metadata_errors=True).validate)
    except ValueError as error:
        if isinstance(error, HfHubHTTPError | HFValidationError):
            raise
        raise PushError(f"the Hub does not take the head of {path}: {' '.join(str(error).split())[:300]}") from error


def _upload(api: HfApi, folder: Path, repository: str) -> None:
    here = {path.name for path in folder.iterdir()}
    there = [name for name in api.list_repo_files(repository) if "/" not in name and Path(name).match(WEIGHTS)]
    old = [escape(name) for name in there if name not in here]
    api.upload_folder(repo_id=repository, folder_path=folder, commit_message=MESSAGE, delete_patterns=old)


def _again(ask: Callable[[], Answer]) -> Answer:
    """Ask the Hub, and once more after each wait where that may help: all that is asked can be asked twice."""
    for wait in WAITS:
        try:
            return ask()
        except Exception as error:  # as above
            if not _may_pass(error):
                raise
            time.sleep(wait)
    return ask()


def _may_pass(error: Exception) -> bool:
    """Whether the Hub or the connection failed, not what was asked."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    return type(error).__module__.startswith(("httpx", "httpcore", "requests")) or isinstance(error, ConnectionError)


def _explained(error: Exception) -> str:
    """Without the error's own words, in which addresses with signatures may stand."""
    for kind, explanation in _EXPLANATIONS.items():
        if isinstance(error, kind):
            return explanation
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if status in (401, 403):
        return f"may not be written ({status}): log in with `hf auth login`, as somebody who may"
    reason = status or getattr(error, "strerror", None) or type(error).__name__
    return f"could not be written ({reason}): check the connection and the disk"
