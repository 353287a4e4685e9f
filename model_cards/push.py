"""A model folder on its way to the Hub."""

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

MESSAGE = "Upload the model with crosshead"
_EXPLANATIONS: dict[type[Exception], str] = {
    HFValidationError: "is no name for the Hub: use one such as organisation/model",
    OfflineModeIsEnabled: "cannot be reached: HF_HUB_OFFLINE is set",
    RepositoryNotFoundError: "cannot be written as nobody: log in with `hf auth login`, as somebody who may",
}
"""What a failure means."""


class PushError(ValueError):
    """A model could not be pushed: the message says why; the folder is as it was."""


def push(folder: Path, repository: str, private: bool = True) -> str:
    """Upload all that the folder holds, in one commit; returns the address.

    The repository is made where it is missing. Who asks for a private one does not get an old one that all can read.
    The token is the one that the Hub's own client finds.
    """
    api = HfApi()
    try:
        made = api.create_repo(repository, private=private, exist_ok=True)
        public = private and not api.model_info(made.repo_id).private
        if not public:
            api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message=MESSAGE)
    except Exception as error:  # the HTTP library's own errors differ between versions of the Hub's client
        raise PushError(f"{repository} {_explained(error)}") from error
    if public:
        raise PushError(f"{repository} is there already and public: choose another name, or say that it may be public")
    return str(made)


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
