"""`crosshead push`: checks a model and uploads it to the Hub."""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer

TOKENS = 8
"""Length of the input of the test run before the upload, in tokens."""


def push(
    model: Annotated[Path, typer.Argument(help="Model directory with a model card, see `crosshead card`.")],
    repository: Annotated[str, typer.Argument(metavar="REPO_ID", help="Hub id, such as organisation/model.")],
    public: Annotated[bool, typer.Option("--public", help="Create a public repository. Default: private.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the directory, list the files, and stop.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code in the directory that is not crosshead's.")
    ] = False,
) -> None:
    """Upload a model to the Hub after checking that it loads.

    The model must load without crosshead, and its files must contain no pickle, no path of this machine, no access
    token and no results of other weights. Repeat the command to continue an interrupted upload. For example:

    crosshead push models/mine me/mine --dry-run
    """
    from crosshead.common.file_bytes import byte_size
    from crosshead.common.model_location import is_hub_id

    if not is_hub_id(repository):
        message = f"{repository!r} is not a valid Hub id: use one such as organisation/model"
        raise typer.BadParameter(message, param_hint="REPO_ID")
    files = checked(model, trust_remote_code)
    if dry_run:
        for name, size in files.items():
            typer.echo(f"{byte_size(size):>12}  {name}")
        kind = "public" if public else "private"
        typer.echo(f"{byte_size(sum(files.values())):>12}  to {repository}, {kind}, as {release()}")
        return
    publish(model, repository, not public, files)


def publish(model: Path, repository: str, private: bool, files: Collection[str]) -> None:
    """Upload the files that passed `checked`, and tag the commit with the version of crosshead."""
    from crosshead.conversion.sources.model_folder import model_files
    from crosshead.model_cards.card import README
    from crosshead.model_cards.push import push as upload
    from crosshead.model_cards.push import tag

    known = model_files(model) | {README, ".gitattributes"}
    others = [name for name in files if name.split("/")[0] not in known]
    if others:
        typer.echo(f"also uploading files that are not part of the model: {ascii(others)[1:-1]}")
    pushed = upload(model, repository, private, files)
    typer.echo(f"pushed to {pushed.address}")
    if pushed.private and not private:
        typer.echo("the repository is private and stays so: change its visibility in its settings on the Hub")
    taken = tag(pushed, release())
    if taken is None:
        typer.echo(f"tagged {release()}")
    else:
        typer.echo(f"the tag {release()} stays at the commit {taken[:12]}: delete the tag and push again to move it")


def checked(folder: Path, trust_remote_code: bool = False) -> dict[str, int]:
    """Check a folder before publication; return its files, name -> bytes. `ValueError` if it cannot be published."""
    import torch

    from crosshead.common.access_tokens import TOKEN
    from crosshead.conversion.architectures.saved_config import saved_auto_class, saved_config
    from crosshead.conversion.calibration.images import random_pixels
    from crosshead.conversion.sources.model_folder import foreign_code
    from crosshead.conversion.verification.reload import reload_check
    from crosshead.model_cards.facts import CONFIG, read_facts, read_json
    from crosshead.model_cards.published import check_folder

    if (folder / CONFIG).is_file() and "_class_name" in read_json(folder / CONFIG):
        raise ValueError(f"{folder} is a model of diffusers, which push cannot check: upload it with `hf upload`")
    files = check_folder(folder, TOKEN)
    read_facts(folder, ())  # refuses results of other weights
    code = foreign_code(folder)
    if code is not None and not trust_remote_code:
        raise ValueError(
            f"{folder} contains code that is not crosshead's ({code}), and checking the model would run it: read it, "
            "then add --trust-remote-code"
        )
    content = read_json(folder / CONFIG)
    config = saved_config(content, folder.name)
    images = hasattr(config, "image_size")
    inputs = random_pixels(config, 1) if images else torch.arange(1, TOKENS + 1)[None] % config.vocab_size
    report, _ = reload_check(folder, inputs, saved_auto_class(config))
    for fault in ("missing", "unexpected", "mismatched", "errors", "unloaded"):
        if report.get(fault):
            raise ValueError(f"{folder} does not load completely without crosshead: {fault} {report[fault][0]}")
    return files


def release() -> str:
    """The tag of a pushed model: the version of crosshead."""
    from importlib.metadata import version

    return f"v{version('crosshead')}"
