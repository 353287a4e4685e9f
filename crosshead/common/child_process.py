"""Runs a program in a child process, and reads the memory counters of this process."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

STATUS = Path("/proc/self/status")


def run_child(
    command: Sequence[str], name: str, error_type: type[ValueError], environment: Mapping[str, str] | None = None
) -> bytes:
    """Run a program and return its stdout; if it fails, raise `error_type` with the last line of its stderr."""
    # In its own process group, so that Ctrl-C reaches only this process, which then kills the child.
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment, process_group=0) as process:
        try:
            output, errors = process.communicate()
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        reason = (errors.decode(errors="replace").strip().splitlines() or ["out of memory?"])[-1]
        raise error_type(f"{name} ended with status {process.returncode}: {reason}")
    return output


def memory_status(field: str) -> int:
    """Bytes of a field in /proc/self/status, such as VmHWM, the peak resident memory; 0 if there is no such field."""
    lines = STATUS.read_text(encoding="utf-8").splitlines() if STATUS.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)
