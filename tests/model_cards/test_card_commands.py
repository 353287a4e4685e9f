"""The commands on a card are exact: they make the same model again, and the recipe is the one that was run."""

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from broken import run
from crosshead.model_cards.facts import Facts
from crosshead.model_cards.metadata import tags
from crosshead.model_cards.sections import citation
from crosshead.recipes.schema.load import load_recipe
from crosshead_command.card import write_card
from toy_checkpoints import write_stock
from toy_data import write_jsonl
from toy_eval import write_scorable
from toys import stock_model

RECIPE = """
output: run
model: {path: made}
data: {sources: [{path: text.jsonl, kind: jsonl}], length: 32}
distillation: {teacher: source, temperature: 2.0}
train: {learning_rate: 1e-4, tokens: 128, batch_tokens: 64, micro_batch: 2, trainable: mixers, warmup: 0.5}
"""


@pytest.fixture
def line(capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda command: run(capfd, monkeypatch, command)


@pytest.mark.parametrize(
    "arguments",
    [
        "--mixer explicit:key_heads=1+2,value_heads=50%,method=svd --mixer mixture:active_heads=75%,shared=calibrated",
        "--mixer knocking:form=linear,on=query+key,layers=1 --dtype bfloat16 --seed 3 --vocab-size 70",
        "--mixer differential --allow-inexact",
        "--mixer explicit:key_heads=1,value_heads=1 --mixer mixture:active_heads=3 --calibration text.txt",
        "--active 75%",
        pytest.param("--mixer explicit --layers auto --budget 0.75", marks=pytest.mark.slow),
        pytest.param(
            "--mixer explicit --mixer mixture:gate_scale=paper --cache 75% --active 75%", marks=pytest.mark.slow
        ),
    ],
)
def test_the_command_on_the_card_makes_the_same_model(tmp_path, line, arguments):
    write_stock(Path("source"))
    Path("text.txt").write_text("the cat sat on the mat, and the dogs ran down to the river. " * 40)
    assert line(f"convert source made {arguments} --no-verify")[0] == 0
    command = re.search(r"```sh\ncrosshead (convert .*)\n```", write_card(Path("made")).read_text())[1]
    before = {path.name: path.read_bytes() for path in Path("made").iterdir() if path.name != "README.md"}
    shutil.rmtree("made")
    assert line(f"{command} --no-verify")[0] == 0, command
    after = {path.name: path.read_bytes() for path in Path("made").iterdir()}
    assert {name for name in before if before[name] != after[name]} <= {"conversion.json"}
    assert json.loads(before["conversion.json"])["tensors"] == json.loads(after["conversion.json"])["tensors"]


@pytest.mark.slow
def test_the_recipe_on_the_card_is_the_one_that_was_run(line):
    write_scorable(stock_model("Llama"), Path("source"))
    write_jsonl(Path("text.jsonl"), ["a quick brown fox, " * 20] * 8)
    Path("first.yaml").write_text(RECIPE)
    assert line("convert source made --mixer knocking --no-verify")[0] == 0
    status, _, err = line("train first.yaml")
    assert status == 0, err
    text = write_card(Path("run/model")).read_text()
    assert "crosshead train recipe.yaml" in text
    (shown,) = re.findall(r"```yaml\n(.*?)\n```", text, re.DOTALL)
    Path("recipe.yaml").write_text(shown)
    assert asdict(load_recipe("recipe.yaml")) == asdict(load_recipe("first.yaml"))
    before = Path("run/model/model.safetensors").read_bytes()
    shutil.rmtree("run")
    assert line("train recipe.yaml")[0] == 0
    assert Path("run/model/model.safetensors").read_bytes() == before


@pytest.mark.parametrize(("version", "cited"), [(1, "2410.05258"), (2, "huggingface.co/blog/microsoft/diff-attn-v2")])
def test_a_card_cites_the_paper_of_the_version(version, cited):
    config = {"model_type": "crosshead_llama", "mixers": {"differential": {"version": version}}}
    facts = Facts(name="made", config=config)
    assert cited in "".join(citation(facts)) and "".join(citation(facts)).count("@misc") == 1
    assert [tag for tag in tags(facts) if tag.startswith("arxiv")] == ["arxiv:2410.05258"][: 2 - version]
