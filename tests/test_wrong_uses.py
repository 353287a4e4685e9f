"""Wrong usage of every command gives the right exit status, one clear line, and leaves no files."""

import tempfile

import pytest
import typer
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

import crosshead
from broken import run, snapshot
from crosshead_command.main import app
from toy_checkpoints import write_stock

RECIPE = "small/smollm2_knocking"
TEXT = "--text text.txt"
CASES = {
    "convrt source out": (2, "'convert'"),
    "--jsn": (2, "--jsn"),
    "convert": (2, "convert [OPTIONS]"),
    "convert source": (2, "'out'"),
    "convert source out more --mixer knocking": (2, "more"),
    "convert source out --mixr knocking": (2, "--mixer"),
    "convert source out --seed one --mixer knocking": (2, "--seed"),
    "convert source out --mixer": (2, "--mixer"),
    "convert source out --mixer knocking --device tpu": (2, "--device"),
    "convert none out --mixer knocking": (1, "HF_HUB_OFFLINE"),
    "convert source made --mixer knocking": (1, "made"),
    "convert source out --mixer knoking": (1, "'knocking'"),
    "convert source out --mixer knocking:form=mpl": (1, "form='mpl'"),
    "convert source out --mixer knocking@encoder": (1, "knocking@encoder"),
    "convert source text.txt/out --mixer knocking": (1, "text.txt/out"),
    "convert source out --mixer explicit:key_heads=1 --calibration datasets:": (1, "datasets:"),
    "convert source out --cache 5%": (1, "--cache 5%"),
    "convert source out --active 5%": (1, "--active 5%"),
    "convert made out --mixer knocking": (1, "crosshead fold"),
    "fold made": (2, "'out'"),
    "fold source out": (1, "crosshead convert"),
    "fold trained out": (1, "form='mlp'"),
    "fold made made": (1, "made"),
    "fold made out --type q8_0": (1, "--type q8_0"),
    "fold made out.gguf --restart": (1, "restart"),
    "fold made out.gguf --type q4_k": (1, "q4_k"),
    "verify source": (2, "'model'"),
    "verify source none": (1, "none"),
    "verify source made --device tpu": (2, "--device"),
    "verify source made --device cpu --engine vllm": (2, "--device"),
    "verify source made --text none.txt": (1, "none.txt"),
    "verify other made": (1, "'source'"),
    "train": (2, "train [OPTIONS]"),
    "train small/none": (1, "small/none"),
    "train text.txt": (1, "text.txt"),
    f"train {RECIPE} --set train.tokns=1": (1, "'tokens'"),
    f"train {RECIPE} --set train.tokens": (1, "train.tokens"),
    "train small/bert_mixture --set objective.name=masked": (1, "'masked_tokens'"),
    f"train {RECIPE} --json": (2, "--dry-run"),
    f"train {RECIPE} --toy source --dry-run": (1, "--toy=source"),
    f"train {RECIPE} --dry-run --save-teacher logits": (2, "--save-teacher"),
    f"train {RECIPE} --set output=there.json": (1, "output=there.json"),
    "sweep": (2, "sweep [OPTIONS]"),
    f"sweep {RECIPE}": (1, "sweep"),
    "sweep papers/mea_1b_sweep --set sweep.rates=x --toy toy": (1, "'rates'"),
    "eval": (2, "eval [OPTIONS]"),
    "eval none --suite offline": (1, "none"),
    "eval source --suite best": (1, "best"),
    "eval source --suite=": (1, "no suite ''"),
    "eval source --suite offline --tasks arc_easy": (2, "--tasks"),
    "eval source --suite offline --data text.txt": (2, "--data"),
    "eval source --suite offline --include-path .": (2, "--include-path"),
    "eval source --data text.txt --backend vllm": (2, "--backend"),
    "eval source --data text.txt": (1, "LlamaForCausalLM"),
    "eval source --data none.txt": (1, "none.txt"),
    "eval source --suite offline --limit 0": (1, "limit"),
    "eval source --suite offline --out no/eval.json": (1, "no/eval.json"),
    "eval source --suite offline --out there.json": (1, "there.json"),
    "inspect source": (2, "'--out'"),
    "inspect source --out page.html": (2, "--image"),
    f"inspect source {TEXT} --target none --out page.html": (1, "--target"),
    "inspect source --image text.txt --out page.html": (1, "--text"),
    f"inspect source {TEXT} --time 3 --out page.html": (1, "--time"),
    f"inspect source {TEXT} --out page.txt": (1, "page.txt"),
    "inspect source --text none.txt --out page.html": (1, "none.txt"),
    f"inspect none {TEXT} --out page.html": (1, "none"),
    "cost": (2, "cost [OPTIONS]"),
    "cost none": (1, "none"),
    "cost source --length 0": (1, "length"),
    "cost source --image-size 224": (1, "image_size=224"),
    "cost source --length 99999999999": (1, "length=99999999999"),
    "cost source --mixer mixture:active_heads=9": (1, "active_heads=9"),
    "convert source out.gguf --mixer knocking": (1, "out.gguf"),
    "convert source out.GGUF --mixer knocking": (1, "out.GGUF"),
    "probe": (2, "probe [OPTIONS]"),
    "probe head source": (2, "'heads'"),
    "probe heads source --draws 0": (2, "--draws"),
    "probe layers made": (1, "crosshead_llama"),
    "probe budget made": (1, "crosshead_llama"),
    "probe budget source --active --method svd": (1, "--method svd"),
    "probe layers source --method svd --calibration none.txt": (1, "--calibration has no effect"),
    "bench": (2, "bench [OPTIONS]"),
    "bench atention": (2, "'attention'"),
    "bench attention mixture-haf-2048": (1, "'mixture-half-2048'"),
    "bench attention --device tpu": (2, "--device"),
    "bench decode cash": (1, "'cache'"),
    "bench decode cache --rounds 1 --out no/decode.json": (1, "no/decode.json"),
    "bench decode cache --rounds 1 --out text.txt": (1, "add --overwrite"),
    "bench compiled explicit-stp": (1, "'explicit-step'"),
    "bench convert neutrl": (1, "'neutral'"),
    "bench convert --gigabytes 0": (2, "--gigabytes"),
    "bench train nothing": (1, "nothing"),
    "bench train knocking-mlp --steps 0": (2, "--steps"),
    "card none": (1, "none"),
    "card source --eval none.json": (1, "none.json"),
    "push source": (2, "'REPO_ID'"),
    "push none me/mine": (1, "none"),
    "push made me/mine": (1, "`crosshead card made`"),
    "push made a/b/c": (2, "'a/b/c'"),
    "zoo --jsn": (2, "--json"),
    "zoo --write none": (1, "none"),
    "zoo --write notes": (1, "notes/README.md"),
    "demo --tiny --model source": (2, "--model"),
    "demo --tiny --out source": (1, "source"),
    "demo --model none": (1, "none"),
}
WITHOUT_WORDS = {"convert", "train", "sweep", "eval", "cost", "probe", "bench"}
"""Commands that print their usage when called without arguments."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """Folder with two stock models, a converted model, the same trained, and files that block outputs."""
    folder = tmp_path_factory.mktemp("place")
    write_stock(folder / "source")
    write_stock(folder / "other", tie_word_embeddings=True)
    for name in ("made", "trained"):
        crosshead.convert(folder / "source", folder / name, {"knocking": {}}, verify=False)
    weights = load_file(folder / "trained" / "model.safetensors")
    trained = {name: tensor + 0.1 * (".mixers." in name) for name, tensor in weights.items()}
    save_file(trained, folder / "trained" / "model.safetensors", metadata={"format": "pt"})
    (folder / "text.txt").write_text("a quick brown fox\n")
    (folder / "there.json").write_text("{}")
    (folder / "notes").mkdir()
    (folder / "notes" / "README.md").write_text("mine")
    (folder / "TMPDIR").mkdir()
    (folder / "HF_HOME").mkdir()
    return folder


@pytest.mark.parametrize("command", CASES)
def test_wrong_use_gives_one_line_and_no_files(command, workspace, capfd, monkeypatch):
    expected, words = CASES[command]
    monkeypatch.chdir(workspace)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in ("TMPDIR", "HF_HOME"):  # for child processes; this process has already read them
        monkeypatch.setenv(name, str(workspace / name))
    monkeypatch.setattr(tempfile, "tempdir", str(workspace / "TMPDIR"))
    for name in ("HF_HUB_CACHE", "HF_ASSETS_CACHE", "HF_XET_CACHE"):
        monkeypatch.setattr(constants, name, str(workspace / "HF_HOME" / name))
    before = snapshot(workspace)
    status, out, err = run(capfd, monkeypatch, command)
    assert snapshot(workspace) == before
    assert (status, out) == (expected, ""), err
    assert words in err and "Traceback" not in err
    if expected == 1:
        assert err.startswith("crosshead: error: ") and err.endswith("\n") and err.count("\n") == 1
    else:
        assert err.startswith(("Usage: ", "Error: "))
        *_, last = err.splitlines()
        assert last.startswith("Error: ") or command in WITHOUT_WORDS, err


def test_every_command_has_a_case():
    tried = {tuple(command.split()[:length]) for command in CASES for length in (1, 2)}
    todo = [((), typer.main.get_command(app))]
    while todo:
        words, command = todo.pop()
        assert not words or words in tried, words
        todo += [((*words, name), subcommand) for name, subcommand in getattr(command, "commands", {}).items()]
    assert len(CASES) >= 40
