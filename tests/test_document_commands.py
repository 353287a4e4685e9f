"""Every command shown in a document works: its options exist, and it succeeds on toys."""

import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
import yaml
from accelerate.commands.launch import launch_command_parser
from huggingface_hub import constants

import document_commands as shown
from broken import run
from crosshead.evals.bench import machine as kept_memory
from crosshead.recipes import bench_train
from crosshead_command.main import app
from rules import ROOT

DOCUMENTS = {shown.name_of(path): path for path in shown.documents()}
COMMANDS = {name: list(shown.shown(path)) for name, path in DOCUMENTS.items()}
SMALL = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 300}
"""Sizes of `crosshead bench train`, shrunk to make the documented command quick."""
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def resolved(words):
    """Return the typer command that the words name, and its remaining arguments."""
    command = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    return command, words


def options(command):
    """Return all option names of a command."""
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    """Folder of toys, and the commands already run in it: later documents may use earlier outputs."""
    folder = tmp_path_factory.mktemp("toys")
    shown.prepare(folder)
    return folder, set()


@pytest.fixture
def workspace(toys, monkeypatch):
    monkeypatch.chdir(toys[0])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(bench_train, "SHAPE", bench_train.SHAPE | SMALL)
    monkeypatch.setattr(bench_train, "LENGTH", 32)
    monkeypatch.setattr(kept_memory, "MALLOC_SETTINGS", {})
    return toys


def documents_with_commands():
    return [name for name, commands in COMMANDS.items() if any(shown.ours(command) for command in commands)]


@pytest.mark.slow
@pytest.mark.parametrize("name", documents_with_commands())
def test_documented_commands_succeed(name, workspace, capfd, monkeypatch):
    _, done = workspace
    for command in COMMANDS[name]:
        words = shown.ours(command)
        if words is None or command in done or shown.SERVING.search(command):
            continue
        done.add(command)
        small = [f"toy-{len(done)}" if word == "toy" else word for word in shown.at_toy_size(words)]
        status, _, err = run(capfd, monkeypatch, small)
        assert status == 0, f"{command}\n{err}"


@pytest.mark.parametrize("name", documents_with_commands())
def test_documented_commands_parse(name):
    """Options and values are checked as well; nothing is run."""
    for words in filter(None, map(shown.ours, COMMANDS[name])):
        command, rest = resolved(shown.at_toy_size(words))
        assert not hasattr(command, "commands"), f"{words}: which command of {command.name}?"
        command.make_context(command.name, list(rest))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_in_sentences_exist(name):
    for command in shown.mentioned(DOCUMENTS[name]):
        command_or_group, rest = resolved(command.split()[1:])
        assert not hasattr(command_or_group, "commands") or not rest, f"{command} is no command"
        assert {word for word in rest if word.startswith("--")} <= options(command_or_group), command
        assert all(word.startswith("--") for word in rest), f"{command} is to be run: it belongs into a block"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_named_options_exist(name):
    """Also checks options that are mentioned without a command."""
    known = {"--nproc_per_node", "--tensor-parallel-size", *launch_command_parser()._option_string_actions}
    groups = [typer.main.get_command(app)]
    while groups:
        group = groups.pop()
        known |= options(group)
        groups += getattr(group, "commands", {}).values()
    named = re.findall(r"`(--[\w-]+)", DOCUMENTS[name].read_text(encoding="utf-8"))
    assert [option for option in named if option not in known] == []


@pytest.mark.parametrize("name", [name for name in COMMANDS if COMMANDS[name]])
def test_arguments_of_other_programs_exist(name):
    for command in COMMANDS[name]:
        program, *words = command.replace("'", "").split()
        assert program in shown.PROGRAMS, f"{command}: what is {program}?"
        CHECKS.get(program, lambda words: None)(words)


def target(words):
    assert f"\n{words[0]}:" in MAKEFILE, f"make {words[0]}"


def extra(words):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    requested = re.findall(r"\[(.*)\]", words[-1])
    assert words[:2] == ["install", "-e"] and set(requested) <= extras.keys()


def configuration(words):
    content = yaml.safe_load((ROOT / words[words.index("--config_file") + 1]).read_text())
    assert content["compute_environment"]


def script(words):
    assert (ROOT / words[0]).is_file()


def tasks(words):
    options_given = dict(zip(words[::2], words[1::2], strict=True))
    folder = ROOT / options_given["--include_path"]
    assert all((folder / f"{task}.yaml").is_file() for task in options_given["--tasks"].split(","))


CHECKS = {"make": target, "pip": extra, "accelerate": configuration, "python": script, "lm_eval": tasks}


def run_program(command, folder, **environment):
    """Run a program and return its stdout; fail if its exit status is not 0."""
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")} | environment
    done = subprocess.run(
        command, cwd=folder, env=os.environ | settings, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_make_demo_works(tmp_path):
    assert "make demo" in COMMANDS["README.md"]
    options = (f"PYTHON={sys.executable}", f"DEMO={tmp_path / 'demo'}", "ARGS=--tiny")
    output = run_program(["make", "-s", "-C", str(ROOT), "demo", *options], tmp_path)
    assert output.splitlines()[0].startswith("model") and (tmp_path / "demo" / "heads.html").is_file()


@pytest.mark.slow
def test_torchrun_command_starts_two_processes(toys, tmp_path):
    (command,) = (line for line in COMMANDS["recipes/accelerate/README.md"] if line.startswith("torchrun"))
    program, *words = command.replace("RECIPE.yaml", str(toys[0] / "recipe.yaml")).replace("FOLDER", "toy").split()
    assert program == "torchrun" and "2" in words
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    run_program([sys.executable, "-P", "-m", "torch.distributed.run", *words], tmp_path, PET_MASTER_PORT=port)
    (result,) = tmp_path.glob("toy/run/model/training.json")
    assert json.loads(result.read_text())["processes"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DOCUMENTS if shown.blocks(DOCUMENTS[name], "python")])
def test_python_examples_run(name, workspace, tmp_path, monkeypatch):
    folder, _ = workspace
    monkeypatch.chdir(tmp_path)
    for toy in {"model", "dit_result", *shown.HUB.values()}:
        Path(toy).symlink_to(folder / toy)
    for example in shown.blocks(DOCUMENTS[name], "python"):
        text = shown.with_toys(example)
        for word, toy in shown.PLACEHOLDERS.items():
            text = text.replace(f'"{word}"', f'"{toy}"')
        # A page may show a file of the package as a whole, with its relative imports.
        exec(compile(text, name, "exec"), {"__name__": "example", "__package__": "crosshead.modeling.mechanisms"})
    if name == "modeling/README.md":
        assert Path("my-model", "config.json").is_file()


def test_unknown_placeholder_is_refused():
    with pytest.raises(ValueError, match="SOMETHING"):
        shown.at_toy_size(["convert", "SOMETHING", "OUT"])


def test_commands_are_extracted_from_a_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "Text with `crosshead eval` in it.\n\n    crosshead fold MODEL OUT    back again\n    make test\n\n"
        "    a tree/    of folders\n\n"
        "```sh\naccelerate launch --config_file x \\\n  -m crosshead train RECIPE.yaml\n```\n"
    )
    commands = list(shown.shown(page))
    launched = "accelerate launch --config_file x -m crosshead train RECIPE.yaml"
    assert commands == [launched, "crosshead fold MODEL OUT", "make test"]
    assert shown.ours(launched) == ["train", "RECIPE.yaml"]
    assert shown.ours("make test") is None
    assert shown.mentioned(page) == ["crosshead eval"]
