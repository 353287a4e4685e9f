"""What every test has."""

import sys

import pytest

from warm_reload import WarmProcess


@pytest.fixture(scope="session")
def warm_process():
    process = WarmProcess()
    yield process
    process.stop()


@pytest.fixture(autouse=True)
def folders_load_in_a_warm_process(request, warm_process, monkeypatch):
    """But where the process itself is what is tested."""
    reload = sys.modules.get("crosshead.conversion.reload")
    if reload is not None and not request.node.get_closest_marker("clean_process"):
        monkeypatch.setattr(reload, "subprocess", warm_process)
