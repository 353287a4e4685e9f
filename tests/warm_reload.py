"""A stand-in for the clean process in which a finished folder is loaded: one that has torch and transformers already.

Importing these takes seconds, which the suite would pay hundreds of times. Here a process that has imported them, and
nothing else, forks for each folder. `test_reload.py` starts the real process.

usage: python -P warm_reload.py HOME
"""

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


class WarmProcess:
    """In place of the module `subprocess` in `reload.py`."""

    DEVNULL = subprocess.DEVNULL

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None
        self._home = TemporaryDirectory()

    def run(
        self, command: list[str], cwd: Path, env: dict[str, str], capture_output: bool, check: bool, stdin: int = 0
    ) -> subprocess.CompletedProcess[bytes]:
        """What `subprocess.run` gives, for `python -P SCRIPT ARGUMENT`."""
        if self._server is None or self._server.poll() is not None:
            self._server = self._started(env)
        errors = Path(self._home.name, "errors")
        request = {"arguments": command[2:], "folder": str(cwd), "environment": env, "errors": str(errors)}
        print(json.dumps(request), file=self._server.stdin, flush=True)
        status = int(self._server.stdout.readline())
        return subprocess.CompletedProcess(command, status, b"", errors.read_bytes())

    def _started(self, env: dict[str, str]) -> "subprocess.Popen[str]":
        home = str(Path(self._home.name, "home"))
        own = env | {"HF_HOME": home, "HF_MODULES_CACHE": f"{home}/modules"}
        command = [sys.executable, "-P", __file__, home]
        return subprocess.Popen(command, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def stop(self) -> None:
        """End the process."""
        if self._server is not None:
            self._server.communicate()
        self._home.cleanup()


def serve(home: Path) -> None:
    """A fork for each line on stdin; its status goes to stdout."""
    import transformers.models.llama.modeling_llama  # noqa: F401  # and all that a model needs
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig  # noqa: F401

    if any(name.partition(".")[0] == "crosshead" for name in sys.modules):
        raise SystemExit("the clean process has crosshead")
    for line in sys.stdin:
        shutil.rmtree(home, ignore_errors=True)
        child = os.fork()
        if child == 0:
            loaded(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def loaded(request: dict[str, Any]) -> None:
    """Run the script, as the process that it is."""
    errors = os.open(request["errors"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(errors, sys.stdout.fileno())
    os.dup2(errors, sys.stderr.fileno())
    os.chdir(request["folder"])
    os.environ.update(request["environment"])
    sys.argv = request["arguments"]
    status = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        print(end.code, file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
