"""An access token is in nothing that a command writes or prints; what a source's own config holds stays in configs."""

import json
import os
import subprocess
import sys

import pytest

from toy_data import write_jsonl
from toy_eval import write_scorable
from toys import stock_model

ENVIRONMENT, PLANTED = "hf_" + "TheTokenOfWhoeverRunsTheseCommands", "hf_" + "ATokenThatTheSourceWasLeftWithAlas"
EVERY_COMMAND = """
import shlex, sys
from crosshead_command.main import main

for command in sys.argv[1:]:
    print("$", command, flush=True)
    print("$", command, file=sys.stderr, flush=True)
    sys.argv = ["crosshead", *shlex.split(command)]
    try:
        main()
    except SystemExit as left:
        print("status", left.code, flush=True)
"""
SMALL = "--windows 1 --length 24"
RECIPE = """
output: run
model: {path: made}
data: {sources: [{path: text.jsonl, kind: jsonl}], length: 32}
train: {learning_rate: 1e-4, tokens: 128, batch_tokens: 64, micro_batch: 2}
"""
COMMANDS = {
    "convert source made --mixer knocking:form=linear": 0,
    "convert source heads --mixer explicit:value_heads=1 --save-calibration seen.safetensors": 0,
    "fold made back": 0,
    "verify source made --json": 0,
    "cost made": 0,
    "train recipe.yaml": 0,
    "eval source made --suite offline --limit 2 --compare": 0,
    "inspect source made --text 'a quick brown fox' --out page.html": 0,
    f"probe heads made --draws 1 {SMALL}": 0,
    f"probe layers source --method svd {SMALL}": 0,
    "card made --eval eval.json --source source": 0,
    "push made me/mine --dry-run": 1,
    "zoo": 0,
    "convert none out --mixer knocking --debug": 1,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Every command, run where a token is in the environment and another in the source's config."""
    folder = tmp_path_factory.mktemp("place")
    source = write_scorable(stock_model("Llama", max_position_embeddings=512), folder / "source")
    content = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(content | {"use_auth_token": PLANTED}))
    (folder / "recipe.yaml").write_text(RECIPE)
    write_jsonl(folder / "text.jsonl", ["a quick brown fox, " * 20])
    (folder / "temporary").mkdir()
    settings = {"HF_TOKEN": ENVIRONMENT, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    settings |= {"HF_HOME": str(folder / "home"), "TMPDIR": str(folder / "temporary"), "HOME": str(folder)}
    command = [sys.executable, "-P", "-c", EVERY_COMMAND, *COMMANDS]
    done = subprocess.run(command, cwd=folder, env=os.environ | settings, capture_output=True, text=True, check=False)
    (folder / "stdout").write_text(done.stdout)
    (folder / "stderr").write_text(done.stderr)
    return folder


def holding(folder, token):
    """The files that hold a token, by their place in the folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix() for path in files if token.encode() in path.read_bytes()}


@pytest.mark.slow
def test_every_command_did_its_work(place):
    statuses = [
        int(line.split()[1]) for line in (place / "stdout").read_text().splitlines() if line.startswith("status ")
    ]
    assert statuses == list(COMMANDS.values()), (place / "stderr").read_text()[-4000:]
    for path in ("made", "back", "heads", "seen.safetensors", "run/model", "eval.json", "page.html", "made/README.md"):
        assert (place / path).exists(), path


@pytest.mark.slow
def test_the_token_of_the_environment_is_nowhere(place):
    assert holding(place, ENVIRONMENT) == set()


@pytest.mark.slow
def test_a_token_in_a_config_goes_no_further_than_the_configs_made_of_it(place):
    """A config's unknown fields are kept, as transformers keeps them; such a model is not pushed."""
    found = holding(place, PLANTED)
    assert {path.rpartition("/")[2] for path in found} == {"config.json"}, found
    assert {"source/config.json", "made/config.json", "back/config.json"} <= found
    assert "error: made/config.json holds an access token" in (place / "stderr").read_text()
