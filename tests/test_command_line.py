import json
import os
import re
import subprocess
import sys

import pytest
import typer

import crosshead
import crosshead_command.main
from broken import run
from crosshead_command.main import app
from crosshead_command.screen import verification_lines
from hub_server import COMMIT, Repository, serving
from toy_checkpoints import write_stock

IMPORTED = """
import sys
sys.argv = ["crosshead", *sys.argv[1:]]
from crosshead_command.main import main
try:
    main()
finally:
    heavy = {"torch", "transformers", "rich", "yaml", "crosshead"}
    print(*heavy & sys.modules.keys(), file=sys.stderr)
"""

MAIN = "from crosshead_command.main import main; main()"


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    write_stock(tmp_path / "source")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run_cli(capfd, monkeypatch):
    return lambda command: run(capfd, monkeypatch, command)


def run_python(*arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-P", *arguments], env=os.environ | environment, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["convert", "--help"], ["fold", "--help"], ["bench", "train", "--help"], ["--version"], ["convrt"]],
)
def test_help_and_version_import_no_heavy_libraries(arguments):
    status, out, err = run_python("-c", IMPORTED, *arguments)
    assert err.splitlines()[-1].split() == []
    assert status == (2 if arguments == ["convrt"] else 0)
    if arguments == ["--help"]:
        assert all(f"\n  {command}  " in out for command in ("convert", "fold", "verify"))


@pytest.mark.slow
def test_command_runs_as_python_module():
    status, out, err = run_python("-m", "crosshead", "--help")
    assert (status, err) == (0, "")
    assert "Usage: " in out


def test_closed_stdout_is_accepted():
    command = f"exec {sys.executable} -P -m crosshead --version >&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("option", ["--version", "--help"])  # by print, and by typer
def test_unwritable_stdout_exits_with_status_1(option):
    command = [sys.executable, "-P", "-c", MAIN, option]
    reading, closed = os.pipe()
    os.close(reading)
    with open("/dev/full", "w") as full, open(closed, "w") as pipe:
        for stream, message in ((full, "crosshead: error: the output cannot be .* left on device\n"), (pipe, "")):
            done = subprocess.run(command, stdout=stream, stderr=subprocess.PIPE, text=True, check=False)
            assert done.returncode == 1 and re.fullmatch(message, done.stderr)


def test_version_option(run_cli):
    status, out, err = run_cli("--version")
    assert (status, err) == (0, "")
    assert out.startswith("crosshead 0.")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("convrt a b", "'convert'"),
        ("convert a b --mixr knocking", "--mixer"),
        ("convert a b --vocabsize 3", "--vocab-size"),
        ("convert a", "'out'"),
        ("convert a b c", "(c)"),
        ("convert a b --seed one", "--seed"),
        ("convert a b --mixer", "--mixer"),
        ("fold a b --mixer knocking", "--mixer"),
        ("verify a", "'model'"),
        ("--verbose", "--verbose"),
    ],
)
def test_wrong_usage_exits_with_status_2(run_cli, command, words):
    status, out, err = run_cli(command)
    assert (status, out) == (2, "")
    assert words in err
    assert "Traceback" not in err


def leaf_commands(command):
    """Return all commands below a group, or the command itself."""
    below = getattr(command, "commands", None)
    return (
        [command] if below is None else [leaf for subcommand in below.values() for leaf in leaf_commands(subcommand)]
    )


@pytest.mark.parametrize("command", leaf_commands(typer.main.get_command(app)), ids=lambda command: command.name)
def test_option_name_as_option_value_is_refused(command):
    arguments = ["x/y" for p in command.params if p.param_type_name == "argument"]
    valued = [p for p in command.params if p.param_type_name == "option" and not p.is_flag]
    for option in valued:
        others = [word for other in valued if other.required and other is not option for word in (other.opts[0], "x")]
        flag = max(option.opts, key=len)
        with pytest.raises(typer.BadParameter) as caught:
            command.make_context(command.name, [*arguments, *others, flag, "--json"])
        assert caught.value.exit_code == 2
        assert flag in caught.value.format_message()


def test_option_name_as_toy_folder_is_refused(workspace, run_cli):
    before = sorted(workspace.iterdir())
    status, out, err = run_cli("train small/smollm2_knocking --toy --dry-run")
    assert (status, out) == (2, "") and "--toy" in err and "--dry-run" in err
    assert sorted(workspace.iterdir()) == before


def test_negative_option_value_is_accepted():
    convert = typer.main.get_command(app).commands["convert"]
    context = convert.make_context("convert", ["source", "out", "--mixer", "knocking", "--seed", "-1"])
    assert context.params["seed"] == -1


def test_convert_json_report(workspace, run_cli):
    status, out, err = run_cli("convert source made --mixer knocking --no-verify --json")
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert report["counts"] == {"copied": 21, "rewritten": 0, "created": 6, "dropped": 0}
    assert report["folder"] == "made"
    assert {key: report[key] for key in report if key != "folder"} == json.loads(
        (workspace / "made" / "conversion.json").read_text()
    )


def test_convert_prints_calibration_text_and_chosen_heads(workspace, run_cli):
    (workspace / "own.txt").write_text("a quick brown fox, " * 40)
    status, out, err = run_cli("convert source one --mixer explicit:value_heads=1 --no-verify")
    assert (status, err) == (0, "")
    assert "\ncalibrated on crosshead's default text" in out
    command = "convert source two --mixer explicit --layers auto --budget 80% --calibration own.txt --no-verify"
    status, out, err = run_cli(command)
    assert (status, err) == (0, "")
    chosen = json.loads((workspace / "two" / "conversion.json").read_text())["chosen"]
    keys, values = (" ".join(map(str, chosen[side])) for side in ("key_heads", "value_heads"))
    texts = "calibrated on own.txt\nlayers chosen on own.txt\n"
    expected = f"KV cache: {chosen['cache']:.1%} of the source's; expected KL divergence: "
    assert f"\n{texts}{expected}{chosen['expected_divergence']:.4f} nats" in out
    fitted = "all layers fitted jointly: KL divergence "
    assert f"\nkey heads by layer: {keys}\nvalue heads by layer: {values}\n{fitted}" in out


def test_verification_text_is_escaped_to_one_line():
    assert list(verification_lines({"greedy_text": "one\ntwo\x1b[2J", "a": {"b_c": 0.25, "d": "eins, zwei"}})) == [
        r"greedy text: 'one\ntwo\x1b[2J'",
        "a:",
        "  b c: 0.25",
        "  d: eins, zwei",
    ]


def test_convert_with_recipe_file(workspace, run_cli):
    (workspace / "recipe.yaml").write_text("mixers:\n  knocking: {form: gate, layers: [1]}\ndtype: bfloat16\n")
    assert run_cli("convert source made --recipe recipe.yaml --no-verify")[0] == 0
    content = json.loads((workspace / "made" / "config.json").read_text())
    assert content["mixers"]["knocking"]["form"] == "gate"
    assert content["mixers"]["knocking"]["layers"] == [1]
    assert content["dtype"] == "bfloat16"
    assert run_cli("convert source other --recipe recipe.yaml --dtype float16 --mixer talking --no-verify")[0] == 0
    content = json.loads((workspace / "other" / "config.json").read_text())
    assert list(content["mixers"]) == ["talking"]
    assert content["dtype"] == "float16"


@pytest.mark.parametrize("command", ["--debug convert ./none out", "convert ./none out --mixer x --debug"])
def test_debug_prints_the_traceback(run_cli, command, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status, out, err = run_cli(command)
    assert (status, out) == (1, "")
    assert err.startswith("Traceback")
    assert err.splitlines()[-1].startswith("crosshead: error: './none' does not exist")


def test_convert_replaces_folder_only_with_overwrite(workspace, run_cli):
    command = "convert source made --no-verify --mixer"
    assert run_cli(f"{command} knocking")[0] == 0
    assert run_cli(f"{command} talking")[0] == 1
    assert run_cli(f"{command} talking --overwrite")[0] == 0
    assert list(json.loads((workspace / "made" / "config.json").read_text())["mixers"]) == ["talking"]


@pytest.mark.slow
def test_convert_and_verify_hub_models(workspace, monkeypatch):
    crosshead.convert("source", "uploaded", {"knocking": {}}, verify=False)
    stock, ours = (
        {file.name: file.read_bytes() for file in (workspace / folder).iterdir()} for folder in ("source", "uploaded")
    )
    with serving({"org/toy": Repository(stock), "org/made": Repository(ours)}) as hub:
        settings = {"HF_ENDPOINT": hub.address, "HF_HOME": str(workspace / "home"), "HF_HUB_DISABLE_XET": "1"}
        settings |= {"NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)  # main() has set it in this process
        command = ("-m", "crosshead", "convert", "org/toy", "made", "--mixer", "talking", "--no-verify")
        done = run_python(*command, **settings)
        verified = run_python("-m", "crosshead", "verify", "source", "org/made", "--json", **settings)
        wrong = run_python(*command[:3], "org/tyo", *command[4:], **settings)
    assert (done[0], done[2]) == (0, "")
    source = json.loads((workspace / "made" / "conversion.json").read_text())["source"]
    assert (source["name"], source["revision"]) == ("org/toy", COMMIT)
    assert (verified[0], verified[2]) == (0, "")
    assert json.loads(verified[1])["verification"]["must_equal"]
    assert wrong[:2] == (1, "")
    assert wrong[2].startswith("crosshead: error: 'org/tyo'")
    assert wrong[2].count("\n") == 1


def test_missing_package_error_names_the_extra(capfd):
    missing = ModuleNotFoundError("No module named 'peft'", name="peft")
    assert crosshead_command.main._status_of(missing, debug=False) == 1
    assert capfd.readouterr().err == "crosshead: error: No module named 'peft': pip install 'crosshead[train]'\n"
