"""Finds the Hub id and the licence of a model's source, for the model card."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosshead.common.model_location import expand_home, is_hub_id, split_revision
from crosshead.model_cards.metadata import licence_of

README = "README.md"
TIMEOUT = 10
"""Seconds to wait for an answer of the Hub."""


def origin_of(recorded: Mapping[str, Any], source: str | Path | None) -> dict[str, Any]:
    """The fields `licence` and `base_model` of `Facts`, as far as they are known.

    `recorded` is the source in the model's records; `source` is given by the user, and must have the recorded name.
    """
    if source is None:
        if recorded.get("kind") != "hub":
            return {}
        return {"base_model": recorded["name"], "licence": _on_the_hub(recorded["name"], recorded.get("revision"))}
    name, revision = split_revision(str(source))
    path = expand_home(name)
    _check_name(recorded, name, path)
    if path.suffix.lower() == ".gguf" and path.is_file():
        return _in_gguf(path)
    if path.is_dir():
        return {"licence": _in_card(path / README)}
    if not is_hub_id(name) or name.lower().endswith(".gguf"):
        raise ValueError(f"--source {name} is no folder, GGUF file or Hub id: check the path, or leave it out")
    return {"base_model": name, "licence": _on_the_hub(name, revision or recorded.get("revision"))}


def _check_name(recorded: Mapping[str, Any], source: str, path: Path) -> None:
    """`ValueError` if the user's source has another name than the recorded one."""
    name = recorded.get("name")
    if name is None or name in (source, path.resolve().name):
        return
    raise ValueError(f"--source {source} is not the source of the model, which is {name}")


def _on_the_hub(name: str, revision: str | None) -> dict[str, str]:
    """The licence in the card of a Hub repository; empty if the Hub does not answer."""
    from huggingface_hub import HfApi

    try:
        metadata = HfApi().model_info(name, revision=revision, timeout=TIMEOUT).card_data
    except Exception:  # the HTTP library's own errors differ between versions of the Hub's client
        return {}
    return licence_of({} if metadata is None else metadata.to_dict())


def _in_card(path: Path) -> dict[str, str]:
    """The licence in the card at `path`; empty if there is none."""
    from huggingface_hub import metadata_load

    try:
        return licence_of(metadata_load(path) or {})
    except Exception:  # the card may be broken
        return {}


def _in_gguf(path: Path) -> dict[str, Any]:
    """`licence` and `base_model` from the metadata of a GGUF file."""
    from crosshead.conversion.gguf.store import GgufStore

    content = GgufStore(path).file.metadata
    named = {
        "license": "general.license",
        "license_name": "general.license.name",
        "license_link": "general.license.link",
    }
    fields: dict[str, Any] = {"licence": licence_of({key: content.get(name) for key, name in named.items()})}
    address = content.get("general.source.repo_url") or content.get("general.base_model.0.repo_url")
    if isinstance(address, str) and address.startswith("https://huggingface.co/"):
        fields["base_model"] = "/".join(address.removeprefix("https://huggingface.co/").split("/")[:2])
    return fields
