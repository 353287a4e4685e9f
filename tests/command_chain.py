"""Runs every command once, in one process, for all tests that check the outputs of commands.

One access token is in the environment and another in the files of two models; tests search the outputs for both.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import crosshead
from hub_server import serving
from scoring_toys import labelled, write_classifier, write_rows
from toy_data import write_jsonl
from toy_eval import write_scorable
from toys import stock_model

ENVIRONMENT, PLANTED = "hf_" + "TheTokenOfWhoeverRunsTheseCommands", "hf_" + "ATokenThatTheSourceWasLeftWithAlas"
FILES = ("config.json", "generation_config.json", "tokenizer_config.json")
LEFT_WITH_IT = {*(f"source/{file}" for file in FILES), *(f"ours/{file}" for file in FILES[:2])}
"""Files that contain the planted token. Tokenizer files of `ours` do not: their strings would enter the vocabulary."""
TEXT = "the cat sat on the mat, and the dogs ran down to the river. when it rained, they all came back. "
MIXERS = {"knocking": {}, "mixture": {"active_heads": 3}}
RECIPE = """
output: run
model: {path: ours}
data: {sources: [{path: text.jsonl, kind: jsonl}], length: 32}
train: {learning_rate: 1e-4, tokens: 128, batch_tokens: 64, micro_batch: 2}
"""
SMALL = "--windows 1 --length 24"
CALIBRATED = "--mixer explicit:key_heads=1,value_heads=1 --mixer mixture:active_heads=3,shared=calibrated"
COMMANDS = {
    "convert source made --mixer knocking:form=linear": 0,
    f"convert source heads {CALIBRATED} --calibration text.txt --save-calibration seen.safetensors": 0,
    "convert source chosen --cache 80% --calibration text.txt --no-verify": 0,
    "convert source fewer --active 80% --calibration text.txt --no-verify": 0,
    f"convert source lines {CALIBRATED} --calibration text.jsonl --no-verify": 0,
    "fold made back": 0,
    "verify source made --json": 0,
    "cost made --json": 0,
    "train recipe.yaml": 0,
    "train recipe.yaml --set model.path=source --set model.tokenizer=ours --set output=stock": 0,
    "eval source made --suite offline --limit 2 --compare": 0,
    "eval classifier --data rows.tsv --out rows.json": 0,
    "inspect source made --text 'a quick brown fox' --out page.html": 0,
    f"probe heads made --draws 1 {SMALL}": 0,
    f"probe layers source --method svd {SMALL}": 0,
    f"probe budget source --method svd {SMALL}": 0,
    f"probe budget source --active {SMALL} --out active.json": 0,
    "card made --eval eval.json --source source": 0,
    "push made me/mine --dry-run": 0,
    "push made me/mine": 0,
    "card ours": 0,
    "push ours me/ours": 1,
    "sweep papers/mea_1b_sweep --toy swept --set sweep.learning_rates=[1e-3,1e-2]": 0,
    "bench decode cache --rounds 1 --out bench.json": 0,
    "zoo": 0,
    "demo --tiny": 0,
    "convert none out --mixer knocking --debug": 1,
}
MAIN = """
import shlex, sys
from crosshead.conversion.verification import reload
from crosshead_command.main import main
from warm_reload import WarmProcess

reload.subprocess = WarmProcess()
for command in sys.argv[1:]:
    print("$", command, flush=True)
    print("$", command, file=sys.stderr, flush=True)
    sys.argv = ["crosshead", *shlex.split(command)]
    try:
        main()
    except SystemExit as left:
        print("\\nstatus", left.code, flush=True)
reload.subprocess.stop()
"""


@dataclass(frozen=True)
class Chain:
    """The working directory of the commands, and their stdout and stderr."""

    folder: Path
    stdout: str
    stderr: str

    @property
    def statuses(self) -> dict[str, int]:
        """Exit status of each command."""
        return {
            command: int(re.findall(r"^status (\d+)$", text, re.MULTILINE)[-1])
            for command, text in _by_command(self.stdout).items()
        }

    def output(self, command: str) -> tuple[str, str]:
        """Return stdout (without the status line) and stderr of one command."""
        out = re.sub(r"\nstatus \d+\n\Z", "", _by_command(self.stdout)[command])
        return out, _by_command(self.stderr)[command]


def _by_command(output: str) -> dict[str, str]:
    parts = re.split(r"^\$ (.*)\n", output, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def run_chain(folder: Path) -> Chain:
    """Run all commands in a folder, with a local test Hub."""
    source = write_scorable(stock_model("Llama", max_position_embeddings=512), folder / "source")
    crosshead.convert(source, folder / "ours", MIXERS, verify=False)
    for name in LEFT_WITH_IT:
        plant(folder / name)
    (folder / "recipe.yaml").write_text(RECIPE)
    write_classifier(folder / "classifier", num_labels=2)
    write_rows(folder / "rows.tsv", labelled([0, 1, 1]))
    (folder / "text.txt").write_text(TEXT * 12)
    write_jsonl(folder / "text.jsonl", ["a quick brown fox, " * 20])
    for name in ("temporary", "hub"):
        (folder / name).mkdir()
    settings = {"HF_TOKEN": ENVIRONMENT, "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    settings |= {
        "PYTHONPATH": str(Path(__file__).parent),
        "HF_HOME": str(folder / "home"),
        "TMPDIR": str(folder / "temporary"),
        "HOME": str(folder),
    }
    command = [sys.executable, "-P", "-c", MAIN, *COMMANDS]
    with serving({}) as hub:
        settings |= {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "1"}
        done = subprocess.run(
            command, cwd=folder, env=os.environ | settings, capture_output=True, text=True, check=False
        )
    for name, content in hub.repositories["me/mine"].files.items():
        (folder / "hub" / name).write_bytes(content)
    return Chain(folder, done.stdout, done.stderr)


def plant(path: Path) -> None:
    """Put the token into a JSON file as a whole value, inside a value, and on a line of a multi-line value."""
    content = json.loads(path.read_text()) if path.exists() else {}
    content.pop("_from_model_config", None)  # transformers drops unknown fields of configs that have it
    planted = {"use_auth_token": PLANTED, "kept": {"by": "us", "key": f"Bearer {PLANTED}"}, "lines": f"a\n{PLANTED}"}
    path.write_text(json.dumps(content | planted))
