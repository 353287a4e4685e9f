"""A fast replacement for the clean process that reloads a converted folder for verification.

Importing torch and transformers takes seconds, which the suite would spend hundreds of times. Here one server process
that has imported only these forks once per folder. `test_reload.py` starts the real process.

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
    """Stand-in for the module `subprocess` in `reload.py`; it starts the server on first use."""

    DEVNULL = subprocess.DEVNULL

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None
        self._home = TemporaryDirectory()

    def run(
        self, command: list[str], cwd: Path, env: dict[str, str], capture_output: bool, check: bool, stdin: int = 0
    ) -> subprocess.CompletedProcess[bytes]:
        """Run `python -P SCRIPT ARGUMENT` in a fork of the server; return a result like `subprocess.run`."""
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
        """Stop the server process."""
        if self._server is not None:
            self._server.communicate()
        self._home.cleanup()


def serve(home: Path) -> None:
    """Fork for each request line on stdin; print the exit status of the fork."""
    import transformers.models.llama.modeling_llama  # noqa: F401  # with the imports of any model
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig  # noqa: F401

    if any(name.partition(".")[0] == "crosshead" for name in sys.modules):
        raise SystemExit("the clean process has imported crosshead")
    for line in sys.stdin:
        shutil.rmtree(home, ignore_errors=True)
        child = os.fork()
        if child == 0:
            loaded(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def loaded(request: dict[str, Any]) -> None:
    """Run the script of a request in this forked process, then exit."""
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
