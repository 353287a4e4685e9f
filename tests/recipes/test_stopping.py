"""Signals stop a run with a checkpoint and an exit status of their own, and nothing is lost."""

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from broken import run as run_command
from crosshead.recipes.schema.sections import LoraOptions
from crosshead.recipes.trainer import callbacks
from crosshead.recipes.trainer.callbacks import StopOnSignal
from crosshead.recipes.trainer.checkpoints import checkpoints, step_of
from crosshead.recipes.trainer.text_objectives import NextToken
from tiers import first
from toy_training import KNOCKING, LORA, losses, metrics, toy_run, train, weights
from training_sessions import Run

DROPOUT = {"lora": LoraOptions(4, 8.0, 0.2)}


def callback_after_step(step, act):
    """Return a progress callback that calls `act` once, after a step."""
    done_already = []

    def show(stage, done, total, message=""):
        if stage == "training" and done == step and not done_already:
            done_already.append(True)
            act()

    return show


@pytest.mark.parametrize("number", first([signal.SIGTERM, signal.SIGINT]))
def test_signalled_run_saves_checkpoint_and_resumes_identically(number, tmp_path):
    whole, recipe = (toy_run(LORA, tmp_path / name, 5, train=DROPOUT) for name in ("whole", "stopped"))
    train(whole)
    before = signal.getsignal(number)
    outcome = train(recipe, callback_after_step(2, lambda: os.kill(os.getpid(), number)))
    assert (outcome.step, outcome.steps, outcome.stopped_by, outcome.model) == (3, 5, number, None)
    assert [step_of(path) for path in checkpoints(Path(recipe.output))] == [3, 2]
    assert signal.getsignal(number) == before
    assert train(recipe).step == 5
    assert losses(recipe) == losses(whole)
    lines = [[(line["step"], "loss" in line) for line in metrics(each)] for each in (whole, recipe)]
    assert lines[0] == [(1, True), (2, True), (3, True), (3, False), (4, True), (5, True), (5, False)]
    assert lines[1] == lines[0]  # the evaluation of step 3 is made after resuming
    scores = [[line["eval_loss"] for line in metrics(each) if "eval_loss" in line] for each in (whole, recipe)]
    assert scores[0] == scores[1]
    result, expected = weights(recipe), weights(whole)
    assert all(result[name].equal(expected[name]) for name in expected)


@pytest.mark.parametrize("last", first([False, True]))
def test_signal_during_evaluation_stops_with_checkpoint(last, tmp_path, monkeypatch):
    """The evaluation ends with a checkpoint of the step before it; after the last step a signal has no effect."""
    watch = {"evaluate_every": 3, "every": 2}
    whole, recipe = (toy_run(KNOCKING, tmp_path / name, 6, watch=watch) for name in ("whole", "stopped"))
    train(whole)
    calls, real = [], NextToken.evaluate

    def signalled(*arguments):
        calls.append(1)
        if len(calls) == batches + 1 if last else len(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments)

    monkeypatch.setattr(NextToken, "evaluate", lambda *arguments: calls.append(1) or real(*arguments))
    train(toy_run(KNOCKING, tmp_path / "counted", 6, watch=watch))
    batches = len(calls) // 2
    assert batches > 1
    calls.clear()
    monkeypatch.setattr(NextToken, "evaluate", signalled)
    outcome = train(recipe)
    if last:
        assert outcome.model and outcome.stopped_by is None and len(calls) == 2 * batches
        return
    assert (outcome.step, outcome.stopped_by, outcome.model, len(calls)) == (3, signal.SIGTERM, None, 1)
    assert step_of(checkpoints(Path(recipe.output))[0]) == 3
    assert train(recipe).step == 6
    assert losses(recipe) == losses(whole)
    lines = [[(line["step"], "eval_loss" in line) for line in metrics(each)] for each in (whole, recipe)]
    assert lines[0] == [(2, False), (3, True), (4, False), (6, False), (6, True)]
    assert lines[1] == [(2, False), (3, False), (3, True), *lines[0][2:]]
    assert all(weights(recipe)[name].equal(part) for name, part in weights(whole).items())


def test_signal_in_last_step_is_ignored(tmp_path):
    recipe = toy_run(KNOCKING, tmp_path, 3)
    outcome = train(recipe, callback_after_step(3, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert outcome.model and outcome.stopped_by is None


@pytest.mark.parametrize("number", first([signal.SIGTERM, signal.SIGINT]))
def test_stopped_command_prints_message_and_exit_status(number, tmp_path, monkeypatch, capfd):
    from crosshead.recipes import train as module

    recipe = toy_run(KNOCKING, tmp_path)
    monkeypatch.setattr("crosshead.recipes.schema.toy.toy", lambda *_: recipe)
    real = module.train
    monkeypatch.setattr(
        module,
        "train",
        lambda requested, show: real(requested, callback_after_step(2, lambda: os.kill(os.getpid(), number))),
    )
    status, out, err = run_command(capfd, monkeypatch, f"train {KNOCKING} --toy {tmp_path}")
    assert (status, out) == (128 + number, "")
    *progress, message = err.splitlines()
    assert message.startswith("crosshead: ") and "step 3 of 4" in message
    assert not any(line.startswith("crosshead: ") for line in progress)


def test_repeated_signal_restores_previous_handler(monkeypatch):
    """Within two seconds it counts as the same signal: a launcher forwards signals that its processes get anyway."""
    clock, times = [50.0], []

    def ours(*_):
        times.append(clock[0])

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    before = signal.signal(signal.SIGTERM, ours)
    try:
        request = StopOnSignal()
        with request.listening():
            for clock[0] in (50.0, 50.5, 52.0):
                os.kill(os.getpid(), signal.SIGTERM)
                assert request.signal == signal.SIGTERM and signal.getsignal(signal.SIGTERM) != ours
            clock[0] = 52.5
            os.kill(os.getpid(), signal.SIGTERM)
            assert times == [52.5] and signal.getsignal(signal.SIGTERM) == ours
        assert signal.getsignal(signal.SIGTERM) == ours
    finally:
        signal.signal(signal.SIGTERM, before)


def test_handler_of_c_code_becomes_the_default():
    """Python reports such a handler as None, which it cannot install."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        request = StopOnSignal()
        request._before = {signal.SIGTERM: None}
        request._restore()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_signal_during_process_sync_stops_at_next_step(monkeypatch):
    request, control = StopOnSignal(), SimpleNamespace(should_training_stop=False)
    state = SimpleNamespace(global_step=1, max_steps=9)

    def greatest(number, args):
        if not number:
            os.kill(os.getpid(), signal.SIGTERM)  # the other processes have answered already
        return number

    monkeypatch.setattr(callbacks, "_maximum", greatest)
    with request.listening():
        for stops in (False, True):
            request.on_step_end(None, state, control)
            assert control.should_training_stop is stops


def test_training_in_a_thread_leaves_signal_handlers():
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    done = []

    def listen():
        with StopOnSignal().listening():
            done.append((signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert done == [handlers]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_stop_together_and_resume_as_one(tmp_path):
    recipe = toy_run(KNOCKING, tmp_path, steps=12, documents=40, train={"micro_batch": 2})
    train(recipe)
    stopped = Run(recipe, tmp_path, "stopped")
    assert stopped.stop_after(4, signal.SIGTERM, processes=2) == [128 + signal.SIGTERM] * 2, stopped.log_text()
    assert 4 < len(stopped.losses()) < 12
    stopped.finish()
    assert list(stopped.losses().values()) == pytest.approx(losses(recipe), abs=1e-5)


@pytest.mark.slow
@pytest.mark.distributed
def test_error_in_several_processes_exits_with_status_one(tmp_path):
    recipe = toy_run(KNOCKING, tmp_path, steps=12, documents=40)
    run = Run(recipe, tmp_path, "refused")
    assert run.end(2, f"model.path={tmp_path / 'nowhere'}") == [1, 1]
    lines = run.log_text().splitlines()
    assert len(lines) == 2 and all("nowhere" in line for line in lines)
