"""The convert command on a card reproduces the model, and the recipe on a card is the one that was run."""

import json
import re
import shlex
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from broken import run
from crosshead.model_cards.commands import convert_command, datasets, recipe_yaml
from crosshead.model_cards.facts import Facts
from crosshead.model_cards.metadata import tags
from crosshead.model_cards.sections import citation, usage
from crosshead.recipes.schema.recipe import load_recipe
from crosshead_command import card_source
from crosshead_command.card import write_card
from gguf_toys import model, write_model
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
def run_cli(capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda command: run(capfd, monkeypatch, command)


@pytest.mark.parametrize(
    "arguments",
    [
        "--mixer explicit:key_heads=1+2,value_heads=50%,method=svd --mixer mixture:active_heads=75%,shared=calibrated",
        "--mixer knocking:form=linear,on=query+key,layers=1 --dtype bfloat16 --seed 3 --vocab-size 70",
        "--mixer differential --allow-inexact",
        "--mixer explicit:key_heads=1,value_heads=1 --mixer mixture:active_heads=3 --calibration text.txt",
        "--active 75% --calibration text.txt",
        pytest.param("--active 75%", marks=pytest.mark.slow),
        pytest.param("--mixer explicit --layers auto --budget 0.75", marks=pytest.mark.slow),
        pytest.param(
            "--mixer explicit --mixer mixture:gate_scale=paper --cache 75% --active 75%", marks=pytest.mark.slow
        ),
    ],
)
def test_convert_command_on_card_reproduces_the_model(tmp_path, run_cli, arguments):
    write_stock(Path("source"))
    Path("text.txt").write_text("the cat sat on the mat, and the dogs ran down to the river. " * 40)
    assert run_cli(f"convert source made {arguments} --no-verify")[0] == 0
    command = re.search(r"```sh\ncrosshead (convert .*)\n```", write_card(Path("made")).read_text())[1]
    before = {path.name: path.read_bytes() for path in Path("made").iterdir() if path.name != "README.md"}
    shutil.rmtree("made")
    assert run_cli(f"{command} --no-verify")[0] == 0, command
    after = {path.name: path.read_bytes() for path in Path("made").iterdir()}
    assert {name for name in before if before[name] != after[name]} <= {"conversion.json"}
    assert json.loads(before["conversion.json"])["tensors"] == json.loads(after["conversion.json"])["tensors"]


@pytest.mark.slow
def test_recipe_on_card_reproduces_the_training(run_cli):
    write_scorable(stock_model("Llama"), Path("source"))
    write_jsonl(Path("text.jsonl"), ["a quick brown fox, " * 20] * 8)
    Path("first.yaml").write_text(RECIPE)
    assert run_cli("convert source made --mixer knocking --no-verify")[0] == 0
    status, _, err = run_cli("train first.yaml")
    assert status == 0, err
    text = write_card(Path("run/model")).read_text()
    assert "crosshead train recipe.yaml" in text
    (shown,) = re.findall(r"```yaml\n(.*?)\n```", text, re.DOTALL)
    Path("recipe.yaml").write_text(shown)
    assert asdict(load_recipe("recipe.yaml")) == asdict(load_recipe("first.yaml"))
    before = Path("run/model/model.safetensors").read_bytes()
    shutil.rmtree("run")
    assert run_cli("train recipe.yaml")[0] == 0
    assert Path("run/model/model.safetensors").read_bytes() == before


@pytest.mark.parametrize("source", ["./typo", "/nowhere/typo", "a/b/c", "my model", "models/typo/", "x.gguf"])
def test_missing_source_is_refused(source, run_cli, tmp_path):
    write_stock(Path("source"))
    assert run_cli("convert source made --mixer knocking --no-verify")[0] == 0
    Path("made/conversion.json").unlink()
    with pytest.raises(ValueError, match=re.escape(source)):
        write_card(Path("made"), source=source)
    assert not Path("made/README.md").exists()


def test_recipe_yaml_keeps_empty_config_values(tmp_path):
    recipe = {"model": {"config": {"q_lora_rank": None, "layer_types": []}, "path": None}, "hub": None}
    assert yaml.safe_load(recipe_yaml(recipe)) == {"model": {"config": recipe["model"]["config"]}}


def test_only_hub_datasets_are_listed():
    paths = ["allenai/c4", "./copy", "my data", "wikitext", "/data/x"]
    sources = [{"path": path, "kind": "hub"} for path in paths] + [{"path": "org/x", "kind": "jsonl"}]
    assert list(datasets({"data": {"sources": sources}})) == ["allenai/c4", "wikitext"]


def test_source_is_read_from_training_json(run_cli, monkeypatch):
    write_stock(Path("source"))
    assert run_cli("convert source made --mixer knocking --no-verify")[0] == 0
    Path("made/conversion.json").unlink()
    record = {"recipe": {"model": {"path": "org/source"}}, "metrics": {}, "processes": 1}
    record["source"] = {"kind": "hub", "name": "org/source", "revision": None}
    Path("made/training.json").write_text(json.dumps(record))
    monkeypatch.setattr(card_source, "_on_the_hub", lambda name, revision: {"license": "mit"})
    text = write_card(Path("made")).read_text()
    assert "base_model: org/source" in text and "license: mit" in text


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("training.json", {"recipe": {}, "metrics": {"loss": 1.0}}),
        ("conversion.json", {"source": {"kind": "hub"}}),
        ("conversion.json", {"source": {"kind": "folder", "name": "x"}, "verification": {"windows": 3}}),
        ("evaluation.json", {"evaluations": [{"suite": None, "scores": [{"name": "x"}]}]}),
    ],
)
def test_incomplete_records_are_refused(file, content, run_cli):
    write_stock(Path("source"))
    assert run_cli("convert source made --mixer knocking --no-verify")[0] == 0
    Path("made", file).write_text(json.dumps(content))
    status, _, err = run_cli("card made")
    assert status == 1 and "a record of made is incomplete" in err and err.count("\n") == 1
    assert not Path("made/README.md").exists()


@pytest.mark.parametrize(("version", "cited"), [(1, "2410.05258"), (2, "huggingface.co/blog/microsoft/diff-attn-v2")])
def test_card_cites_paper_of_differential_version(version, cited):
    config = {"model_type": "crosshead_llama", "mixers": {"differential": {"version": version}}}
    facts = Facts(name="made", config=config)
    assert cited in "".join(citation(facts)) and "".join(citation(facts)).count("@misc") == 1
    assert [tag for tag in tags(facts) if tag.startswith("arxiv")] == ["arxiv:2410.05258"][: 2 - version]


@pytest.mark.parametrize("revision", ["a" * 40, None])
def test_fold_command_on_card_has_the_revision(revision):
    source = {"kind": "hub", "name": "org/made", "revision": revision}
    expected = "crosshead fold org/made stock" + (f" --revision {revision}" if revision else "")
    assert convert_command({"command": "fold", "source": source}, "stock") == expected


def test_scoring_command_on_card_quotes_the_name():
    text = "\n".join(usage(Facts(name="my model", config={"model_type": "llama"})))
    command = re.search(r"^lm_eval .*$", text, re.MULTILINE)[0]
    assert shlex.split(command)[3:6] == ["--model_args", "pretrained=my model", "--tasks"]


def test_names_on_card_are_not_read_as_options():
    assert convert_command({"source": {"name": "-in"}}, "-out") == "crosshead convert ./-in ./-out"


def test_gguf_with_licence_link_only_and_address_of_a_page(tmp_path):
    metadata = {
        "general.license.link": "https://example.org/licence",
        "general.source.repo_url": "https://huggingface.co/org/m/tree/main",
    }
    path = tmp_path / "toy.gguf"
    write_model(path, model("Llama"), "Llama", **metadata)
    assert card_source.origin_of({}, path) == {"licence": {}, "base_model": "org/m"}
