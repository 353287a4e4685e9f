"""Checkpoints from the Hub: the files that a conversion reads, at one commit, in the Hub's own cache."""

from pathlib import Path

from huggingface_hub import HfApi, is_offline_mode, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from crosshead.common.checked_json import shown
from crosshead.common.errors import ConversionError

from .safetensors_store import INDEX, WEIGHTS, read_index

_EXPLANATIONS: dict[type[Exception], str] = {
    HFValidationError: "is no model's name on the Hub either: give a path, or a name such as organisation/model",
    GatedRepoError: "is gated on the Hub: ask for access on its page and log in with `hf auth login`",
    RevisionNotFoundError: "has no revision {revision!r} on the Hub: give a branch, a tag or a commit of it",
    RepositoryNotFoundError: "is not on the Hub, or is private: check the name, or log in with `hf auth login`",
    LocalEntryNotFoundError: "is not complete in the Hub's cache here, and the Hub cannot be asked: go online, "
    "without HF_HUB_OFFLINE",
}
"""What a failure means, the most special first."""


def fetch(repository: str, revision: str | None, side_files: list[str]) -> tuple[Path, str]:
    """Download a model's config, safetensors and `side_files`; returns the folder and the commit."""
    wanted = ["config.json", WEIGHTS, INDEX, *side_files]
    try:
        if not is_offline_mode():
            _check_weights(repository, HfApi().list_repo_files(repository, revision=revision))
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=wanted))
        if not (folder / WEIGHTS).exists() and (folder / INDEX).exists():
            shards = sorted(set(read_index(folder / INDEX).values()))  # whatever they are called
            snapshot_download(repository, revision=folder.name, allow_patterns=shards)
    except ConversionError:
        raise
    except Exception as error:  # the HTTP library's own errors differ between versions of the Hub's client
        raise ConversionError(
            f"{shown(repository)}, which is no local folder, {_explained(error, revision)}"
        ) from error
    return folder, folder.name


def _check_weights(repository: str, files: list[str]) -> None:
    if WEIGHTS in files or INDEX in files:
        return
    if any(file.endswith(".gguf") for file in files):
        raise ConversionError(f"{repository!r} holds GGUF files alone: download one of them and give its path")
    raise ConversionError(
        f"{repository!r} holds no {WEIGHTS}, and pickles (pytorch_model.bin) are not read because they can run code: "
        "look for a safetensors version of the model, or save one with transformers"
    )


def _explained(error: Exception, revision: str | None) -> str:
    """Without the error's own words, in which addresses with signatures may stand."""
    for kind, explanation in _EXPLANATIONS.items():
        if isinstance(error, kind):
            return explanation.format(revision=revision)
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if status in (401, 403):
        return f"is refused by the Hub ({status}): log in with `hf auth login`, as somebody who may read it"
    reason = status or getattr(error, "strerror", None) or type(error).__name__
    return f"cannot be fetched from the Hub ({reason}): check the connection and the disk, then try again"
