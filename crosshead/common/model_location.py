"""Location of a model: a folder, or a Hub id with an optional revision, `organisation/model@revision`."""

import os
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # exported when it is first used
from safetensors import SafetensorError, safe_open

from .errors import one_line

RESULT, TRAINING = "model", "training.json"
"""Name of the model folder that a training run writes, and of the training record in it."""
ADAPTER = "adapter_config.json"
"""Configuration file of a peft adapter. transformers loads the adapter with the model of the same folder."""
MERGE_ADAPTER = (
    "add it to its base model with merge_and_unload, save the model and its tokenizer, and give that folder"
)
"""What messages advise on an adapter."""
MAX_LAYERS = 1000
"""Maximum number of layers; the loading of a damaged config with more would not end."""
LICENCES = ("LICENSE", "LICENCE", "LICENSE-MODEL", "LICENSE-CODE", "COPYING", "NOTICE", "USE_POLICY")
LICENCE_FILES = tuple(f"{name}{ending}" for name in LICENCES for ending in ("", ".txt", ".md"))
"""Licence files, which are copied from a model to every model made from it."""
LOADER_STATE = ("is_local", "local_files_only")
"""Loading arguments that transformers saves in tokenizer_config.json, where they would affect every later load."""


def split_revision(name: str) -> tuple[str, str | None]:
    """Split `organisation/model@revision` into Hub id and revision; the revision is None for any other name."""
    model, mark, revision = name.rpartition("@")
    if not (mark and model and revision) or os.path.exists(name):
        return name, None
    return model, revision


def expand_home(path: str | Path) -> Path:
    """The path with `~` replaced by the home folder. `Path.expanduser` would raise for `~` of an unknown user."""
    return Path(os.path.expanduser(path))


def model_label(name: str) -> str:
    """A short name of the model: its Hub id, its folder name or, for the result of a training run, the run name."""
    if not (path := expand_home(name)).is_dir():
        return name
    path = path.resolve()
    return path.parent.name if path.name == RESULT and (path / TRAINING).is_file() else path.name


def is_hub_id(name: str) -> bool:
    """True if the name is a valid Hub id."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def pretrained_arguments(name: str) -> dict[str, str]:
    """The arguments of `from_pretrained` for a folder or Hub id, with the revision if the name has one."""
    model, revision = split_revision(name)
    return {"pretrained_model_name_or_path": model} | ({} if revision is None else {"revision": revision})


def check_layers(config: Any, name: str, error_type: type[ValueError]) -> None:
    """Raise `error_type` if a config has more than MAX_LAYERS layers."""
    layers = getattr(config, "num_hidden_layers", None)
    if isinstance(layers, int) and layers > MAX_LAYERS:
        raise error_type(f"{name} has num_hidden_layers={layers}: use at most {MAX_LAYERS:,}")


def foreign_link(path: Path, folder: Path) -> Path | None:
    """The target of a symbolic link that leads out of the folder to a file of another name; otherwise None.

    Such a link may point to a private file, which must not be copied or published. Links into the blobs of the Hub's
    cache are allowed.
    """
    if not path.is_symlink():
        return None
    target, root = path.resolve(), folder.resolve()
    in_cache = target.parent == root.parent.parent / "blobs"
    return None if target.is_relative_to(root) or target.name == path.name or in_cache else target


def failed_load(error: Exception, folder: Path) -> str:
    """Return in one line why a model's folder cannot be loaded, with the name of the damaged file if there is one."""
    if isinstance(error, SafetensorError):
        for path in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(path, "np"):
                    continue
            except (OSError, SafetensorError) as damage:
                return f"{path} is damaged or truncated ({one_line(damage)}): download it again"
    return one_line(error)
