"""`crosshead push`."""

from pathlib import Path
from typing import Annotated

import typer

TOKENS = 8
"""Of the text that a model is run on before it is pushed."""


def push(
    model: Annotated[Path, typer.Argument(help="The folder of a model, with its card.")],
    repository: Annotated[
        str, typer.Argument(metavar="REPO_ID", help="Its name on the Hub, such as organisation/model.")
    ],
    public: Annotated[bool, typer.Option("--public", help="For all to read; private if not given.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Look at the folder, list what would go, and stop.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code of MODEL's folder that is not this crosshead's own.")
    ] = False,
) -> None:
    """Upload a model to the Hub after checking that it loads.

    It must load in a process without crosshead, and hold no pickle, no path of this machine and no access token. What
    was interrupted goes on with the same command. For example:

    crosshead push models/mine me/mine --dry-run
    """
    from crosshead.model_cards.tables import volume

    _check_name(repository)
    files = checked(model, trust_remote_code)
    if dry_run:
        for name, size in files.items():
            typer.echo(f"{volume(size):>12}  {name}")
        kind = "public" if public else "private"
        typer.echo(f"{volume(sum(files.values())):>12}  to {repository}, {kind}, as {release()}")
        return
    publish(model, repository, not public)


def publish(model: Path, repository: str, private: bool) -> None:
    """Upload a folder that is `checked`, and name what was uploaded by this crosshead's version."""
    from crosshead.model_cards.push import push as upload
    from crosshead.model_cards.push import tag

    pushed = upload(model, repository, private)
    typer.echo(f"pushed to {pushed.address}")
    taken = tag(pushed, release())
    told = f"tagged {release()}" if taken is None else f"{release()} is the name of {taken[:12]} already: left there"
    typer.echo(told)


def checked(folder: Path, trust_remote_code: bool = False) -> dict[str, int]:
    """The files of a folder that is fit to be published, and their sizes; ValueError where it is not."""
    import torch

    from crosshead.common.access_tokens import TOKEN
    from crosshead.conversion.sources.model_folder import foreign_code
    from crosshead.conversion.verification.reload import reload_check
    from crosshead.model_cards.facts import CONFIG, read_json
    from crosshead.model_cards.published import check_folder

    files = check_folder(folder, TOKEN)
    code = foreign_code(folder)
    if code is not None and not trust_remote_code:
        raise ValueError(
            f"{folder} brings code that is not this crosshead's own ({code}), and looking at the model would run it: "
            "look at it, then say --trust-remote-code"
        )
    known = int(read_json(folder / CONFIG)["vocab_size"])
    found = reload_check(folder, torch.arange(1, TOKENS + 1)[None] % known)
    for fault in ("missing", "unexpected", "mismatched", "errors", "unloaded"):
        if found.get(fault):
            raise ValueError(f"{folder} does not load whole elsewhere: {fault} {found[fault][0]}")
    return files


def release() -> str:
    """The name that a pushed model gets: this crosshead's version."""
    from importlib.metadata import version

    return f"v{version('crosshead')}"


def _check_name(repository: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # exported when it is first used

    try:
        validate_repo_id(repository)
    except HFValidationError:
        raise typer.BadParameter(
            f"{repository!r} is no name for the Hub: use one such as organisation/model", param_hint="REPO_ID"
        ) from None
