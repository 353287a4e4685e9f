"""Progress bars and lines of the commands on stderr."""

import re

import pytest
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
from transformers.utils.logging import is_progress_bar_enabled

from crosshead_command.screen import progress


def test_progress_bars_show_bytes_and_time_left(capfd, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    with progress() as show:
        show("calibrating", 3, 30, "loss 2.5")
        show("writing", 0, 2_000_000_000)
        show("writing", 500_000_000, 2_000_000_000)
    output = capfd.readouterr().err
    assert re.search(r"calibrating .*3/30.*loss 2\.5", output)
    assert re.search(r"writing .*0\.5/1\.9 GiB.*-:--:--|writing .*0\.5/1\.9 GiB.*\d:\d\d:\d\d", output)


@pytest.mark.parametrize("terminal", [True, False])
def test_bars_of_downloads_are_shown_on_a_terminal_alone(terminal, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1" if terminal else "")
    enable_progress_bars()
    with progress():
        assert are_progress_bars_disabled() is not terminal
        assert not is_progress_bar_enabled()  # the bars of transformers


def test_progress_lines_show_time_left(capfd, monkeypatch):
    """Without a terminal, progress lines estimate the time left, also if single steps take minutes."""
    clock = [0.0]
    monkeypatch.setattr("crosshead_command.screen.time.monotonic", lambda: clock[0])
    with progress() as show:
        for clock[0], done in ((5.0, 10), (65.0, 11), (185.0, 12), (305.0, 20)):
            show("training", done, 20, f"loss {done}")
        show("scoring", 0, 2**62)
        clock[0] = 306.0
        show("scoring", 1, 2**62, "for ever")
    assert capfd.readouterr().err.splitlines() == [
        "training 10 of 20: loss 10",
        "training 11 of 20: loss 11, 0:09:00 left",
        "training 12 of 20: loss 12, 0:12:00 left",
        "training 20 of 20: loss 20",
        f"scoring 1 of {2**62}: for ever",
    ]


def test_second_run_of_a_stage_has_its_own_time_left(capfd, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("crosshead_command.screen.time.monotonic", lambda: clock[0])
    with progress() as show:
        for clock[0], done in ((0.0, 0), (100.0, 1), (200.0, 2), (201.0, 0), (202.0, 1), (203.0, 2)):
            show("masking", done, 2, f"at {clock[0]:g}")
        for clock[0], done in ((300.0, 1), (400.0, 2), (401.0, 1), (402.0, 2)):
            show("scoring", done, 3, f"at {clock[0]:g}")
    assert capfd.readouterr().err.splitlines() == [
        "masking 0 of 2: at 0",
        "masking 1 of 2: at 100, 0:01:40 left",
        "masking 2 of 2: at 200",
        "masking 0 of 2: at 201",
        "masking 1 of 2: at 202, 0:00:01 left",
        "masking 2 of 2: at 203",
        "scoring 1 of 3: at 300",
        "scoring 2 of 3: at 400, 0:01:40 left",
        "scoring 1 of 3: at 401",
        "scoring 2 of 3: at 402, 0:00:01 left",
    ]
