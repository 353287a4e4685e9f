"""A conversion that is killed, stopped, or met by another one: the target is absent, as it was, or complete."""

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
"""When a run is killed, as a part of the time that it takes."""
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
    sys.stdin.readline()  # until then its number stays its own
    print("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Runs each conversion in a process of its own, without the seconds that the libraries' imports take."""


class Runner:
    """Runs command lines one after the other, each to its end or to a signal."""

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

    def tell(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def start(self, command):
        self.tell(command)
        return self.told("started")

    def end(self):
        """The exit status; minus the signal where one ended it."""
        self.tell("wait")
        return self.told("ended")

    def told(self, word):
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
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    write_model(toys.stock_model("Llama", **SIZES), folder / "source", 40_000)
    return folder


@pytest.fixture(scope="module")
def runner(place):
    runner = Runner(place)
    yield runner
    runner.process.stdin.close()
    runner.process.wait()


def convert(out, mixer=MIXER, *more):
    return " ".join(["convert", "source", out, "--mixer", mixer, "--no-verify", *more])


def contents(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(place, runner):
    """What undisturbed runs write, and how long they take."""
    found = {}
    for name, mixer in (("warm", MIXER), ("whole", MIXER), ("other", OTHER)):
        begin = time.perf_counter()
        assert runner.run(convert(name, mixer)) == 0
        found[name] = contents(place / name), time.perf_counter() - begin
    assert len(list((place / "source").glob("*.safetensors"))) > 10
    assert found["warm"][0] == found["whole"][0] != found["other"][0]
    return {"duration": min(found["warm"][1], found["whole"][1]), MIXER: found["whole"][0], OTHER: found["other"][0]}


def hidden(place):
    return sorted(path.name for path in place.iterdir() if path.name.startswith("."))


@pytest.mark.parametrize("moments", first([EARLY_AND_LATE, RANDOM]), ids=["early and late", "random"])
def test_killed(moments, place, runner, whole):
    source = snapshot(place / "source")
    for moment in moments:
        for attempt in range(20):  # the machine may have become faster than it was
            out = f"killed{moment}-{attempt}"
            status = runner.run(convert(out), signal.SIGKILL, moment * 0.8**attempt * whole["duration"])
            assert snapshot(place / "source") == source
            refused = (place / out).exists()
            assert runner.run(convert(out)) == refused
            assert contents(place / out) == whole[MIXER]
            assert hidden(place) == []
            if status == -signal.SIGKILL:
                break
        assert status == -signal.SIGKILL


@pytest.mark.slow
def test_killed_again_and_again_goes_on(place, runner, whole):
    for moment in range(6):
        status = runner.run(convert("again"), signal.SIGKILL, whole["duration"] * (0.2 + moment / 10))
        if not status:
            break
    assert (place / "again").exists() or runner.run(convert("again")) == 0
    assert contents(place / "again") == whole[MIXER]
    assert hidden(place) == []


@pytest.mark.parametrize("moments", first([EARLY_AND_LATE, RANDOM]), ids=["early and late", "random"])
def test_killed_while_it_replaces(moments, place, runner, whole):
    shutil.rmtree(place / "replaced", ignore_errors=True)
    assert runner.run(convert("replaced", OTHER)) == 0
    mixers = [OTHER, MIXER]
    for moment in moments:
        runner.run(convert("replaced", mixers[1], "--overwrite"), signal.SIGKILL, moment * whole["duration"])
        if (place / "replaced" / "config.json").exists():
            assert contents(place / "replaced") in (whole[OTHER], whole[MIXER])
        else:  # its files were being moved in: they are the new ones, or still wait beside it
            assert (place / ".replaced.crosshead-partial" / "publish.json").exists()
        assert runner.run(convert("replaced", mixers[1], "--overwrite")) == 0
        assert contents(place / "replaced") == whole[mixers[1]]
        assert hidden(place) == []
        mixers.reverse()


@pytest.mark.parametrize("one", first([MIXER, OTHER]))
def test_another_conversion_never_takes_over_what_was_left(place, runner, whole, one):
    other = OTHER if one == MIXER else MIXER
    out = f"mixed-{one.partition(':')[0]}"
    for part in (0.5, 0.7, 0.9):
        if runner.run(convert(out, one, "--overwrite"), signal.SIGKILL, part * whole["duration"]):
            work = place / f".{out}.crosshead-partial"
            if runner.run(convert(out, other, "--overwrite")):  # refused, because something was finished
                assert str(work) in runner.log.read_text().splitlines()[-1]
                assert list((work / "model").glob("*.safetensors"))
                assert runner.run(convert(out, other, "--overwrite", "--restart")) == 0
            assert contents(place / out) == whole[other]
            assert hidden(place) == []


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_stopped_by_hand(place, runner, whole, sent):
    source = snapshot(place / "source")
    begun = runner.log.stat().st_size
    for attempt in range(20):  # the machine may have become faster than it was
        out = f"stopped{sent}-{attempt}"  # a run that was done before the signal leaves its target
        status = runner.run(convert(out), sent, 0.5 * 0.8**attempt * whole["duration"])
        if status:
            break
    assert status == 128 + sent
    said = runner.log.read_text()[begun:].splitlines()
    assert said[-1].startswith(f"crosshead: {'interrupted' if sent == signal.SIGINT else 'terminated'}: ")
    assert snapshot(place / "source") == source
    assert not (place / out).exists()
    assert runner.run(convert(out)) == 0
    assert contents(place / out) == whole[MIXER]
    assert hidden(place) == []


@pytest.fixture(scope="module")
def folded(place, runner):
    """A model in `ours`, what an undisturbed fold of it writes, its record, and how long that takes."""
    assert runner.run(convert("ours", "knocking:form=linear")) == 0
    begin = time.perf_counter()
    assert runner.run("fold ours folded --no-verify") == 0
    duration = time.perf_counter() - begin
    return contents(place / "folded"), (place / "folded.conversion.json").read_bytes(), duration


@pytest.mark.parametrize("moment", [0.3, *first((0.9, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0))])
def test_a_fold_that_is_killed(moment, place, runner, folded):
    """The stock model and the record beside it come together."""
    whole, record, duration = folded
    command = f"fold ours back{moment} --no-verify"
    runner.run(command, signal.SIGKILL, duration * moment)
    made, said = place / f"back{moment}", place / f"back{moment}.conversion.json"
    assert made.exists() or not said.exists()
    runner.run(command)  # goes on; refused where it is there already
    assert contents(made) == whole
    assert said.read_bytes() == record
    assert hidden(place) == []


def test_a_fold_overwrites_neither_a_model_nor_a_record(place, runner, folded):
    command = "fold ours twice --no-verify"
    assert runner.run(command) == 0
    assert runner.run(command) == 1
    shutil.rmtree(place / "twice")
    assert runner.run(command) == 1  # somebody's record is still there
    assert "twice.conversion.json" in runner.log.read_text().splitlines()[-1]
    assert hidden(place) == [] and not (place / "twice").exists()
    assert runner.run(f"{command} --overwrite") == 0


def test_two_at_once(place, runner, whole):
    child = runner.start(convert("both"))
    while not (place / ".both.crosshead-partial" / "journal.json").exists():
        time.sleep(0.001)
    os.kill(child, signal.SIGSTOP)
    try:
        with pytest.raises(ConversionError, match=str(place / "both")):
            crosshead.convert(place / "source", place / "both", {"knocking": {}}, verify=False)
    finally:
        os.kill(child, signal.SIGCONT)
    assert runner.end() == 0
    assert contents(place / "both") == whole[MIXER]
    assert hidden(place) == []


@pytest.mark.slow
def test_a_fold_with_its_cache_is_killed(place, runner):
    fold = "fold fewer {} --keep-cache --no-verify"
    assert runner.run(convert("fewer", "explicit:key_heads=1,value_heads=1,method=svd")) == 0
    begin = time.perf_counter()
    assert runner.run(fold.format("served")) == 0
    duration, wanted, before = time.perf_counter() - begin, contents(place / "served"), snapshot(place / "fewer")
    for moment in (0.2, 0.5, 0.8):
        status = runner.run(fold.format(f"served{moment}"), signal.SIGKILL, moment * duration)
        published = (place / f"served{moment}").exists()
        assert status or published
        # Killed between the folder and the record beside it: the next run moves the record, and refuses to overwrite.
        assert not status or runner.run(fold.format(f"served{moment}")) == (1 if published else 0)
        assert contents(place / f"served{moment}") == wanted
        assert snapshot(place / "fewer") == before
    assert hidden(place) == []
