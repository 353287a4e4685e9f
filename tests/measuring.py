"""Runs the measurement scripts of tests/measure/ as subprocesses."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def measured(script, *arguments):
    """Run a script of tests/measure/ and return the lines of its stdout."""
    paths = os.pathsep.join(map(str, (TESTS, TESTS / "measure")))
    settings = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        [sys.executable, "-P", str(TESTS / "measure" / script), *map(str, arguments)],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
