"""Where a model is: a folder, or a Hub id, with an optional revision behind it."""

import os
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # exported when it is first used

RESULT, TRAINING = "model", "training.json"
"""The name of the folder that a training writes, and its record there."""

MOST_LAYERS = 1000
LICENCES = ("LICENSE", "LICENCE", "LICENSE-MODEL", "LICENSE-CODE", "COPYING", "NOTICE", "USE_POLICY")
LICENCE_FILES = tuple(f"{name}{ending}" for name in LICENCES for ending in ("", ".txt", ".md"))
"""Files that stay with a model and what is made from it."""
LOADER_STATE = ("is_local", "local_files_only")
"""Arguments of loading that transformers saves among a tokenizer's settings, where they would apply to everyone."""


def split_revision(name: str) -> tuple[str, str | None]:
    """A Hub id such as `organisation/model@revision` in its two parts; any other name has no revision."""
    place, mark, revision = name.rpartition("@")
    if not (mark and place and revision) or os.path.exists(name):
        return name, None
    return place, revision


def expanded(place: str | Path) -> Path:
    """A path with the home folder for `~`; that of an unknown user, where `Path.expanduser` raises, stays as it is."""
    return Path(os.path.expanduser(place))


def model_label(name: str) -> str:
    """A short name: a Hub id, the name of a folder, or of a training's result that of its run."""
    if not (place := expanded(name)).is_dir():
        return name
    place = place.resolve()
    return place.parent.name if place.name == RESULT and (place / TRAINING).is_file() else place.name


def is_hub_id(name: str) -> bool:
    """Whether a name is valid on the Hub."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def placed(name: str) -> dict[str, str]:
    """The arguments of `from_pretrained` for a name: a model's, or a model's with a revision."""
    place, revision = split_revision(name)
    return {"pretrained_model_name_or_path": place} | ({} if revision is None else {"revision": revision})


def check_layers(config: Any, name: str, error_type: type[ValueError]) -> None:
    """An error of the given type for a number of layers that no model has, and whose loading would not end."""
    layers = getattr(config, "num_hidden_layers", None)
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise error_type(f"{name} has num_hidden_layers={layers}: use at most {MOST_LAYERS:,}")


def foreign_link(path: Path, folder: Path) -> Path | None:
    """The target of a link that leads out of a folder to a file of another name; the Hub's cache may have such links.

    It may be a private file that somebody wants to be copied or published.
    """
    if not path.is_symlink():
        return None
    target, root = path.resolve(), folder.resolve()
    in_cache = target.parent == root.parent.parent / "blobs"
    return None if target.is_relative_to(root) or target.name == path.name or in_cache else target
