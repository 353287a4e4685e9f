"""Points the huggingface_hub client of this process to a local test Hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import transformers
from huggingface_hub import constants

from crosshead.model_cards import push as pushing
from hub_server import Repository, serving


@contextmanager
def own_hub(monkeypatch: pytest.MonkeyPatch, token: str) -> Iterator[Any]:
    """Serve an empty Hub for uploads; failed uploads are retried without delay."""
    with serving({}) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.address)
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)  # a client of another address
        template = running.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", token)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(pushing, "WAITS", (0.0, 0.0))
        yield running


@contextmanager
def hub_with(monkeypatch: pytest.MonkeyPatch, repositories: dict[str, Repository], cache: Path) -> Iterator[Any]:
    """Serve a Hub with these repositories for downloads into the given cache folder."""
    with serving(repositories) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.address)
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)  # a client of another address
        template = running.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield running
