"""What every test has."""

import subprocess

import pytest

from warm_reload import WarmProcess


@pytest.fixture(scope="session", autouse=True)
def warm_process():
    """Finished folders load in a process that has imported torch and transformers already."""
    from crosshead.conversion.verification import reload

    process = WarmProcess()
    reload.subprocess = process
    yield process
    reload.subprocess = subprocess
    process.stop()


@pytest.fixture(autouse=True)
def clean_process(request, monkeypatch):
    """But where the process itself is what is tested."""
    if request.node.get_closest_marker("clean_process"):
        from crosshead.conversion.verification import reload

        monkeypatch.setattr(reload, "subprocess", subprocess)
