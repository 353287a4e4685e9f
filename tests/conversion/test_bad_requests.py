"""Requests that a sound checkpoint cannot fulfil: a one-line error, and no files left behind."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import crosshead
from broken import CONVERT, Case, config, leaves_nothing, refused, run, snapshot
from toy_checkpoints import MANY_SHARDS, write_model, write_stock

TO, EXPLICIT = "convert source out --mixer ", "convert source out --mixer explicit:value_heads=1"
RECIPE = "convert source out --recipe recipe.yaml"
APART, OFFLINE = "source", "HF_HUB_OFFLINE"


def create_beside(name, content=b""):
    """Return a function that makes a file (bytes), a link (str) or a folder (list of names) beside the source."""

    def make(folder):
        path = folder.parent / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, str):
            path.symlink_to(content)
        else:
            path.mkdir()
            for file in content:
                (path / file).write_text("{}")

    return make


def write_other_calibration(folder):
    save_file({"0.statistics.x": torch.ones(2)}, folder.parent / "c.safetensors")


def convert_another_source(**changes):
    """Return a function that writes the conversion of another source to `out`."""

    def make(folder):
        write_stock(folder.parent / "third", **changes)
        crosshead.convert(folder.parent / "third", folder.parent / "out", {"knocking": {}}, verify=False)

    return make


def train_mixers(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    for name, parameter in model.named_parameters():
        parameter.data += 0.1 * (".mixers." in name)
    write_model(model, folder)


def recipe_case(text):
    return Case(text[1], create_beside("recipe.yaml", text[0].encode()), RECIPE)


MIXERS = {
    "knoking": "'knocking'",
    "knocking:from=mlp": "'form'",
    "knocking:form=mpl": "form='mpl'",
    "knocking:form": "'form'",
    "knocking:form=mlp,form=gate": "'form'",
    "knocking --mixer knocking": "--mixer knocking",
    "knocking:on=value+keys": "'keys'",
    "knocking:layers=0+5": "layers=[0, 5]",
    "knocking:layers=x": "layers=['x']",
    "knocking:init=random": "--allow-inexact",
    "explicit:key_heads=8": "key_heads=8",
    "explicit:key_heads=0": "key_heads=0",
    "explicit:key_heads=-1": "key_heads=-1",
    "explicit:key_heads=150%": "'150%'",
    "explicit:key_heads=nan%": "'nan%'",
    "explicit:key_heads=1+2+1": "[1, 2, 1]",
    "explicit:key_heads=two": "'two'",
    "explicit:key_heads=1.5": "1.5",
    "explicit:methd=svd": "'method'",
    "explicit:method=pca": "'pca'",
    "explicit:norm=true": "--allow-inexact",
    "mixture": "active_heads",
    "mixture:active_heads=9": "active_heads=9",
    "mixture:active_heads=2,shared_heads=3": "shared_heads=3",
    "mixture:active_heads=3,balance_weight=nan": "balance_weight=nan",
    "mixture:active_heads=3,shared=most": "shared='most'",
    "talking:softmax_heads=0": "softmax_heads=0",
    "talking:dynamic=x": "'x'",
    "talking --mixer differential --allow-inexact": "differential",
    "differential": "--allow-inexact",
    "knocking --vocab-size 60": "--vocab-size 60",
    "knocking --vocab-size 0": "--vocab-size 0",
    "knocking --vocab-size 4000000000": "GiB",
    "knocking --dtype int8": "'int8'",
    "knocking --layers some": "'some'",
    "knocking --layers auto": "--budget",
    "knocking --cache 50%": "explicit",
    "explicit --cache 150%": "--cache 150%",
    "explicit --cache half": "--cache half",
    "explicit --cache 50% --budget 0.5": "--cache",
    "knocking --budget 0.5": "--layers auto",
    "explicit --layers auto --budget 2": "--budget 2",
    "explicit --layers auto --budget 0": "--budget 0",
    "knocking --layers auto --budget 0.5": "explicit",
    "knocking --seed -1": "--seed -1",
    "knocking --revision main": "revision='main'",
}
OTHERS = {
    "convert source out": "--mixer",
    f"{EXPLICIT} --calibration none.txt": "none.txt",
    f"{EXPLICIT} --calibration none.safetensors": "none.safetensors",
    f"{EXPLICIT} --calibration source": "source",
    f"{EXPLICIT} --calibration source/model.safetensors": "source/model.safetensors",
    f"{RECIPE}": "recipe.yaml",
    "convert none out --mixer knocking": OFFLINE,
    "convert org/modle out --mixer knocking": "'org/modle'",
    "convert ./none out --mixer knocking": "'./none'",
    "convert none.gguf out --mixer knocking": "'none.gguf'",
    "convert source/model.safetensors out --mixer knocking": "source/model.safetensors",
    "convert source source --mixer knocking": APART,
    "convert source source/out --mixer knocking": APART,
    "convert source . --mixer knocking --overwrite": APART,
    "convert source source/../source --mixer knocking": APART,
    "convert source /proc/out --mixer knocking": "/proc/out",
    "convert source /dev/null --mixer knocking": "/dev/null",
    "convert source /dev/null/out --mixer knocking": "/dev/null/out",
    f"convert source {'x' * 300} --mixer knocking": "xxx",
    "fold source back": "crosshead convert",
    "verify source none": OFFLINE,
    "verify source source --text none.txt": "none.txt",
    "verify source source --text source/model.safetensors": "source/model.safetensors",
}
ALL = {f"{TO}{mixer}": Case(words, command=TO + mixer) for mixer, words in MIXERS.items()}
ALL |= {command: Case(words, command=command) for command, words in OTHERS.items()}
ALL |= {
    "target is a file": Case("out", create_beside("out"), CONVERT),
    "target is a folder": Case("out", create_beside("out", ["notes"]), CONVERT),
    "target is a link": Case(APART, create_beside("out", "source"), CONVERT),
    "file with --overwrite": Case("out", create_beside("out"), f"{CONVERT} --overwrite"),
    "no model with --overwrite": Case("out", create_beside("out", ["notes"]), f"{CONVERT} --overwrite"),
    "link with --overwrite": Case("out", create_beside("out", "nowhere"), f"{CONVERT} --overwrite"),
    "parent is a file": Case("file/out", create_beside("file"), "convert source file/out --mixer knocking"),
    "empty calibration": Case("t.txt", create_beside("t.txt"), f"{EXPLICIT} --calibration t.txt"),
    "binary calibration": Case("t.txt", create_beside("t.txt", b"\xff\xfe\0"), f"{EXPLICIT} --calibration t.txt"),
    "short calibration": Case("3 tokens", create_beside("t.txt", b"abc"), f"{EXPLICIT} --calibration t.txt"),
    "no calibration": Case("c.safetensors", create_beside("c.safetensors"), f"{EXPLICIT} --calibration c.safetensors"),
    "other calibration": Case("c.safetensors", write_other_calibration, f"{EXPLICIT} --calibration c.safetensors"),
    "convert of ours": Case("crosshead fold", base="made"),
    "fold of unknown mixers": Case("'nocking'", config(mixers={"nocking": {}}), "fold source back", "made"),
    "fold without its tensors": Case("talking.logits", config(mixers={"talking": {}}), "fold source back", "made"),
    "fold of no mixers": Case("knocking.value", config(mixers=None), "fold source back", "made"),
    "fold of many layers": Case("1000000000", config(num_hidden_layers=10**9), "fold source back", "made"),
    "folder in the record's place": Case(
        "back.conversion.json",
        create_beside("back.conversion.json", []),
        "fold source back --overwrite",
        "made",
    ),
    "fold of what cannot fold": Case("form='mlp'", train_mixers, "fold source back", "made"),
    "verify of another": Case("'third'", convert_another_source(tie_word_embeddings=True), "verify source out"),
    "verify of other layers": Case("'third'", convert_another_source(num_hidden_layers=3), "verify source out"),
    "verify of other words": Case("'third'", convert_another_source(vocab_size=60), "verify source out"),
    "recipe of unknown mixer": recipe_case(("mixers: {knoking: {}}", "'knocking'")),
    "recipe of unknown option": recipe_case(("mixer: {}", "'mixers'")),
    "recipe of no mapping": recipe_case(("mixers: knocking", "mixers='knocking'")),
    "recipe without mixers": recipe_case(("dtype: float16", "--mixer")),
    "recipe with a bad number": recipe_case(("{mixers: {knocking: {}}, seed: x}", "seed='x'")),
    "recipe with a bad flag": recipe_case(("{mixers: {knocking: {}}, allow_inexact: perhaps}", "'perhaps'")),
    "recipe that says it twice": recipe_case(("mixers: {knocking: {}, knocking: {form: gate}}", "recipe.yaml")),
    "recipe without end": recipe_case(("&a [*a]", "YAML")),
    "recipe of nothing": recipe_case(("", "recipe.yaml")),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    write_stock(folder / "one")
    write_stock(folder / "sharded", shard_size=MANY_SHARDS)
    crosshead.convert(folder / "one", folder / "made", {"knocking": {}}, verify=False)
    return folder


@pytest.mark.parametrize("case", ALL.values(), ids=[name[:60] for name in ALL])
def test_bad_request_gives_one_line_error_and_no_files(case, bases, tmp_path, capfd, monkeypatch):
    leaves_nothing(case, bases, tmp_path, capfd, monkeypatch)


def test_command_in_subprocess_gives_one_line_error_and_no_files(bases, tmp_path):
    shutil.copytree(bases / "one", tmp_path / "source")
    before = snapshot(tmp_path)
    arguments = [sys.executable, "-P", "-m", "crosshead", "convert", "source", "out", "--mixer", "knoking"]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("crosshead: error: ") and done.stderr.count("\n") == 1
    assert snapshot(tmp_path) == before


def test_symlinked_shards_are_converted_to_regular_files(bases, tmp_path, capfd, monkeypatch):
    shutil.copytree(bases / "sharded", tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(f"../blobs/{file.name}")
    monkeypatch.chdir(tmp_path)
    assert run(capfd, monkeypatch, "convert snapshot out --mixer knocking --no-verify")[0] == 0
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 1 MB; the test is skipped where this user cannot mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        not shutil.which("mount")
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("no small disk can be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("out", ["disk/out", "disk"])
def test_full_disk_is_refused_until_space_is_freed(out, small_disk, bases, tmp_path, capfd, monkeypatch):
    """If OUT is the mount point itself, the filler file lies beside the model that is replaced."""
    shutil.copytree(bases / "one", tmp_path / "source")
    command = f"convert source {out} --mixer knocking --no-verify --overwrite"
    if out == "disk":
        for name in ("config.json", "model.safetensors"):
            (small_disk / name).write_text("{}")
    filler = small_disk / "filler"
    filler.write_bytes(os.urandom(2**20 - 30_000))
    before = snapshot(tmp_path)
    refused(Case(" KiB free", command=command), tmp_path, capfd, monkeypatch)
    assert snapshot(tmp_path) == before
    filler.write_bytes(os.urandom(2**20 - 110_000))
    refused(Case(" KiB", command=command), tmp_path, capfd, monkeypatch)
    work = small_disk / (".crosshead-partial" if out == "disk" else ".out.crosshead-partial")
    assert (work / "model" / "model.safetensors").exists()
    filler.write_bytes(b"")
    assert run(capfd, monkeypatch, command)[0] == 0
    assert not work.exists() and filler.exists()


def test_read_only_disk_is_refused(small_disk, bases, tmp_path, capfd, monkeypatch):
    shutil.copytree(bases / "one", tmp_path / "source")
    if subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], capture_output=True, check=False).returncode:
        pytest.skip("no disk can be made read-only here")
    words = "[Errno 30]"
    refused(Case(words, command="convert source disk/out --mixer knocking"), tmp_path, capfd, monkeypatch)
