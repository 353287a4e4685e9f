"""A model folder on its way to the Hub.

`upload_folder` does the transfer: it sends one commit (of very large folders several, each complete in its files),
skips what the Hub has, and, called again after a failure, goes on where it stopped, because the Hub keeps what was
sent by its hash. `upload_large_folder`, which also existed, is deprecated for it and gone from the client's version 2.
"""

import re
import time
from collections.abc import Callable
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
    | tokenizer\.model | vocab\.txt | merges\.txt | chat_template\.jinja | additional_chat_templates/[^/]+\.jinja
    | (conversion|training|evaluation)\.json
    | (configuration|modeling)_crosshead\.py
    """,
    re.VERBOSE,
)
"""Files that loaders or `crosshead card` take for a part of the model, by their name in the repository."""
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


@dataclass(frozen=True)
class Pushed:
    """A model on the Hub."""

    address: RepoUrl
    """It knows the repository's full name."""
    commit: str
    """The one that has all of the folder."""


def push(folder: Path, repository: str, private: bool = True) -> Pushed:
    """Upload all that the folder holds.

    The repository is made where it is missing. Who asks for a private one does not get an old one that all can read.
    Files of an earlier model that the folder does not have, such as weights, a chat template or an adapter's
    configuration, are removed, as they would be loaded with these; other files stay. The token is the one that the
    Hub's own client finds.
    """
    api = HfApi()
    try:
        _check_on_the_hub(folder / README)
        made = _again(lambda: api.create_repo(repository, private=private, exist_ok=True))
        if private and not _again(lambda: api.model_info(made.repo_id)).private:
            raise PushError(
                f"{repository} is there already and public: choose another name, or say that it may be public"
            )
        return Pushed(made, _again(lambda: _upload(api, folder, made.repo_id)))
    except PushError:
        raise
    except Exception as error:  # the HTTP library's own errors differ between versions of the Hub's client
        raise PushError(f"{repository} {_explained(error)}") from error


def tag(pushed: Pushed, name: str) -> str | None:
    """Name the commit that was pushed; where another one has the name, that one, and nothing is changed."""
    api, repository, commit = HfApi(), pushed.address.repo_id, pushed.commit
    try:
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


def _upload(api: HfApi, folder: Path, repository: str) -> str:
    """The folder's files, without those of an earlier model beside them; returns the commit."""
    here = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    there = [name for name in api.list_repo_files(repository) if MODEL_FILES.fullmatch(name)]
    old = [escape(name) for name in there if name not in here]
    done = api.upload_folder(repo_id=repository, folder_path=folder, commit_message=MESSAGE, delete_patterns=old)
    return done.oid


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
