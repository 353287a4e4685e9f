"""Conversions that are killed, interrupted or run concurrently: the target is absent, unchanged or complete."""

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

import crosshead
import toys
from broken import snapshot
from crosshead.common.errors import ConversionError
from tiers import first
from toy_checkpoints import write_model

MIXER, OTHER = "knocking:on=query+key+value", "talking"
SIZES = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 8, "head_dim": 24}
EARLY_AND_LATE, RANDOM = (0.2, 0.8), [random.Random(0).random() for _ in range(20)]
"""Times at which a run is killed, as fractions of its duration."""
WORKER = """
import os, shutil, signal, sys
import crosshead
from crosshead.conversion import options
from crosshead_command.main import main
from rich import progress
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored in the background
crosshead.convert("source", "first", {"knocking": {}}, verify=False)
shutil.rmtree("first")
while command := sys.stdin.readline():
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.argv = ["crosshead", *command.split()]
        try:
            main()
        except SystemExit as left:
            os._exit(left.code)  # taking a forked interpreter down takes longer than a conversion
    print("started", child, flush=True)
    sys.stdin.readline()  # until the child is waited for, its process id is not used again
    print("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Forks a process for each command line, which saves the seconds of importing the libraries."""


class Runner:
    """Runs command lines one after the other, each until it ends or gets a signal."""

    def __init__(self, folder):
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.log = folder / "errors"
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", WORKER],
            cwd=folder,
            env=environment,
            **options | {"stderr": self.log.open("w")},
        )

    def send(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def start(self, command):
        self.send(command)
        return self.answer("started")

    def end(self):
        """Wait for the process; return its exit status, or minus the signal that ended it."""
        self.send("wait")
        return self.answer("ended")

    def answer(self, word):
        line = self.process.stdout.readline()
        assert line.startswith(word), self.log.read_text()
        return int(line.removeprefix(word))

    def run(self, command, sent=None, delay=0.0):
        child = self.start(command)
        if sent is not None:
            time.sleep(delay)
            os.kill(child, sent)
        return self.end()


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    write_model(toys.stock_model("Llama", **SIZES), folder / "source", 40_000)
    return folder


@pytest.fixture(scope="module")
def runner(workdir):
    runner = Runner(workdir)
    yield runner
    runner.process.stdin.close()
    runner.process.wait()


def convert_command(out, mixer=MIXER, *more):
    return " ".join(["convert", "source", out, "--mixer", mixer, "--no-verify", *more])


def file_digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def uninterrupted_runs(workdir, runner):
    """Digests of the files that uninterrupted runs write, by mixer, and the shortest duration of a run."""
    results = {}
    for name, mixer in (("warm", MIXER), ("whole", MIXER), ("other", OTHER)):
        begin = time.perf_counter()
        assert runner.run(convert_command(name, mixer)) == 0
        results[name] = file_digests(workdir / name), time.perf_counter() - begin
    assert len(list((workdir / "source").glob("*.safetensors"))) > 10
    assert results["warm"][0] == results["whole"][0] != results["other"][0]
    return {
        "duration": min(results["warm"][1], results["whole"][1]),
        MIXER: results["whole"][0],
        OTHER: results["other"][0],
    }


def hidden_files(workdir):
    return sorted(path.name for path in workdir.iterdir() if path.name.startswith("."))


@pytest.mark.parametrize("moments", first([EARLY_AND_LATE, RANDOM]), ids=["early and late", "random"])
def test_next_run_completes_killed_conversion(moments, workdir, runner, uninterrupted_runs):
    source = snapshot(workdir / "source")
    for moment in moments:
        for attempt in range(20):  # the machine may have become faster than it was
            out = f"killed{moment}-{attempt}"
            status = runner.run(
                convert_command(out), signal.SIGKILL, moment * 0.8**attempt * uninterrupted_runs["duration"]
            )
            assert snapshot(workdir / "source") == source
            refused = (workdir / out).exists()
            assert runner.run(convert_command(out)) == refused
            assert file_digests(workdir / out) == uninterrupted_runs[MIXER]
            assert hidden_files(workdir) == []
            if status == -signal.SIGKILL:
                break
        assert status == -signal.SIGKILL


@pytest.mark.slow
def test_repeatedly_killed_conversion_is_completed(workdir, runner, uninterrupted_runs):
    for moment in range(6):
        status = runner.run(
            convert_command("again"), signal.SIGKILL, uninterrupted_runs["duration"] * (0.2 + moment / 10)
        )
        if not status:
            break
    assert (workdir / "again").exists() or runner.run(convert_command("again")) == 0
    assert file_digests(workdir / "again") == uninterrupted_runs[MIXER]
    assert hidden_files(workdir) == []


@pytest.mark.parametrize("moments", first([EARLY_AND_LATE, RANDOM]), ids=["early and late", "random"])
def test_killed_overwrite_is_completed_by_next_run(moments, workdir, runner, uninterrupted_runs):
    shutil.rmtree(workdir / "replaced", ignore_errors=True)
    assert runner.run(convert_command("replaced", OTHER)) == 0
    mixers = [OTHER, MIXER]
    for moment in moments:
        runner.run(
            convert_command("replaced", mixers[1], "--overwrite"),
            signal.SIGKILL,
            moment * uninterrupted_runs["duration"],
        )
        if (workdir / "replaced" / "config.json").exists():
            assert file_digests(workdir / "replaced") in (uninterrupted_runs[OTHER], uninterrupted_runs[MIXER])
        else:  # killed while the files were moved into it: all new files are in it or in the work folder
            assert (workdir / ".replaced.crosshead-partial" / "publish.json").exists()
        assert runner.run(convert_command("replaced", mixers[1], "--overwrite")) == 0
        assert file_digests(workdir / "replaced") == uninterrupted_runs[mixers[1]]
        assert hidden_files(workdir) == []
        mixers.reverse()


@pytest.mark.parametrize("one", first([MIXER, OTHER]))
def test_work_of_killed_run_is_not_used_by_other_conversion(workdir, runner, uninterrupted_runs, one):
    other = OTHER if one == MIXER else MIXER
    out = f"mixed-{one.partition(':')[0]}"
    work = workdir / f".{out}.crosshead-partial"
    for part in (0.5, 0.7, 0.9):
        for attempt in range(20):  # the machine may have become faster than it was
            delay = part * 0.8**attempt * uninterrupted_runs["duration"]
            if status := runner.run(convert_command(out, one, "--overwrite"), signal.SIGKILL, delay):
                break
        assert status == -signal.SIGKILL
        if runner.run(convert_command(out, other, "--overwrite")):  # refused, because a shard was finished
            assert str(work) in runner.log.read_text().splitlines()[-1]
            assert list((work / "model").glob("*.safetensors"))
            assert runner.run(convert_command(out, other, "--overwrite", "--restart")) == 0
        assert file_digests(workdir / out) == uninterrupted_runs[other]
        assert hidden_files(workdir) == []


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_sigint_or_sigterm_stops_conversion_and_next_run_completes(workdir, runner, uninterrupted_runs, sent):
    source = snapshot(workdir / "source")
    log_size = runner.log.stat().st_size
    for attempt in range(20):  # the machine may have become faster than it was
        out = f"stopped{sent}-{attempt}"  # a run that ended before the signal leaves its target
        status = runner.run(convert_command(out), sent, 0.5 * 0.8**attempt * uninterrupted_runs["duration"])
        if status:
            break
    assert status == 128 + sent
    lines = runner.log.read_text()[log_size:].splitlines()
    assert lines[-1].startswith(f"crosshead: {'interrupted' if sent == signal.SIGINT else 'terminated'}: ")
    assert snapshot(workdir / "source") == source
    assert not (workdir / out).exists()
    assert runner.run(convert_command(out)) == 0
    assert file_digests(workdir / out) == uninterrupted_runs[MIXER]
    assert hidden_files(workdir) == []


@pytest.fixture(scope="module")
def uninterrupted_fold(workdir, runner):
    """Digests of the files, the record and the duration of an uninterrupted fold of the model in `ours`."""
    assert runner.run(convert_command("ours", "knocking:form=linear")) == 0
    begin = time.perf_counter()
    assert runner.run("fold ours folded --no-verify") == 0
    duration = time.perf_counter() - begin
    return file_digests(workdir / "folded"), (workdir / "folded.conversion.json").read_bytes(), duration


@pytest.mark.parametrize("moment", [0.3, *first((0.9, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0))])
def test_next_run_completes_killed_fold(moment, workdir, runner, uninterrupted_fold):
    """The record never exists without the stock model beside it."""
    whole, record, duration = uninterrupted_fold
    command = f"fold ours back{moment} --no-verify"
    runner.run(command, signal.SIGKILL, duration * moment)
    made, record_path = workdir / f"back{moment}", workdir / f"back{moment}.conversion.json"
    assert made.exists() or not record_path.exists()
    runner.run(command)  # continues, or is refused if the model exists already
    assert file_digests(made) == whole
    assert record_path.read_bytes() == record
    assert hidden_files(workdir) == []


def test_fold_refuses_existing_model_or_record_without_overwrite(workdir, runner, uninterrupted_fold):
    command = "fold ours twice --no-verify"
    assert runner.run(command) == 0
    assert runner.run(command) == 1
    shutil.rmtree(workdir / "twice")
    assert runner.run(command) == 1  # the old record still exists
    assert "twice.conversion.json" in runner.log.read_text().splitlines()[-1]
    assert hidden_files(workdir) == [] and not (workdir / "twice").exists()
    assert runner.run(f"{command} --overwrite") == 0


def test_concurrent_conversion_to_same_target_is_refused(workdir, runner, uninterrupted_runs):
    child = runner.start(convert_command("both"))
    while not (workdir / ".both.crosshead-partial" / "journal.json").exists():
        time.sleep(0.001)
    os.kill(child, signal.SIGSTOP)
    try:
        with pytest.raises(ConversionError, match=str(workdir / "both")):
            crosshead.convert(workdir / "source", workdir / "both", {"knocking": {}}, verify=False)
    finally:
        os.kill(child, signal.SIGCONT)
    assert runner.end() == 0
    assert file_digests(workdir / "both") == uninterrupted_runs[MIXER]
    assert hidden_files(workdir) == []


@pytest.mark.slow
def test_next_run_completes_killed_fold_with_keep_cache(workdir, runner):
    fold = "fold fewer {} --keep-cache --no-verify"
    assert runner.run(convert_command("fewer", "explicit:key_heads=1,value_heads=1,method=svd")) == 0
    begin = time.perf_counter()
    assert runner.run(fold.format("served")) == 0
    duration, expected, before = (
        time.perf_counter() - begin,
        file_digests(workdir / "served"),
        snapshot(workdir / "fewer"),
    )
    for moment in (0.2, 0.5, 0.8):
        status = runner.run(fold.format(f"served{moment}"), signal.SIGKILL, moment * duration)
        published = (workdir / f"served{moment}").exists()
        assert status or published
        # Killed between the folder and the record beside it: the next run moves the record, and refuses to overwrite.
        assert not status or runner.run(fold.format(f"served{moment}")) == (1 if published else 0)
        assert file_digests(workdir / f"served{moment}") == expected
        assert snapshot(workdir / "fewer") == before
    assert hidden_files(workdir) == []
