"""Fixtures of every test."""

import subprocess

import pytest

from warm_reload import WarmProcess


@pytest.fixture(scope="session", autouse=True)
def warm_process():
    """Run the reload check of conversions in a process that has already imported torch and transformers."""
    from crosshead.conversion.verification import reload

    process = WarmProcess()
    reload.subprocess = process
    yield process
    reload.subprocess = subprocess
    process.stop()


@pytest.fixture(scope="session", autouse=True)
def short_joint_fit():
    """Fit all layers jointly by two steps: tests convert hundreds of toys. The tests of the fit set their own."""
    from crosshead.conversion.compress import joint_fit

    joint_fit.STEPS = joint_fit.ROUTED_STEPS = 2


@pytest.fixture(autouse=True)
def clean_process(request, monkeypatch):
    """Use a real subprocess in tests marked `clean_process`."""
    if request.node.get_closest_marker("clean_process"):
        from crosshead.conversion.verification import reload

        monkeypatch.setattr(reload, "subprocess", subprocess)
