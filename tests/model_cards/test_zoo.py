"""The committed zoo pages match the output of `crosshead zoo --write` and list every shipped recipe."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

import crosshead.model_cards.zoo as zoo
from broken import run
from card_toys import ROW, report, training
from crosshead.model_cards.evaluations import model_results
from crosshead.model_cards.tables import NOT_MEASURED
from crosshead.recipes.schema.recipe import shipped_recipes
from crosshead_command.main import main
from crosshead_command.zoo import SHORT_RUNS, entries
from hub_rules import faults

CARDS = Path(__file__).resolve().parents[2] / "model_cards"


pytestmark = pytest.mark.xdist_group("zoo")


@pytest.fixture(scope="module")
def zoo_folder(tmp_path_factory):
    """The folder of pages that `crosshead zoo --write` produces from the committed measurements."""
    folder = tmp_path_factory.mktemp("zoo") / "model_cards"
    for name in ("model_cards/measured", "evals/results"):
        if (CARDS.parent / name).exists():
            shutil.copytree(CARDS.parent / name, folder.parent / name)
    (folder / "small").mkdir(parents=True)
    (folder / "small/old_recipe.md").write_text("gone")
    (folder / "small/notes.md").write_text("mine")
    (folder / zoo.ZOO).write_text(json.dumps({"models": [{"recipe": "small/old_recipe"}]}))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as left:
        patch.setattr(sys, "argv", ["crosshead", "zoo", "--write", str(folder)])
        main()
    assert left.value.code == 0
    return folder


@pytest.fixture(scope="module")
def generated_pages(zoo_folder):
    """Text of each generated page, by relative path."""
    return pages_in(zoo_folder)


@pytest.fixture
def few_recipes(monkeypatch):
    """Keep four recipes only: computing the cost of every recipe's model takes seconds."""
    names = ("small/smollm2_knocking", "small/smollm2_talking", "small/smollm2_mixture", "small/smollm2_explicit")
    few = {name: path for name, path in shipped_recipes().items() if name in names}
    monkeypatch.setattr("crosshead.recipes.schema.recipe.shipped_recipes", lambda: few)


def pages_in(folder):
    paths = [*folder.rglob("*.md"), folder / zoo.ZOO]
    paths = [path for path in paths if path.name != "notes.md"]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


@pytest.fixture
def run_cli(capfd, monkeypatch):
    return lambda command: run(capfd, monkeypatch, command)


def test_committed_pages_are_up_to_date(generated_pages):
    committed = pages_in(CARDS)
    stale = {name for name in generated_pages | committed if committed.get(name) != generated_pages.get(name)}
    assert not stale, "run `crosshead zoo --write model_cards`"


def test_pages_of_removed_recipes_are_deleted(zoo_folder):
    assert not (zoo_folder / "small/old_recipe.md").exists()
    assert (zoo_folder / "small/notes.md").read_text() == "mine"
    assert not list(zoo_folder.parent.rglob("*.partial"))


def test_every_recipe_has_a_valid_card(generated_pages):
    recipes = {name for name, path in shipped_recipes().items() if "\nsweep:" not in path.read_text()}
    assert {f"{name}.md" for name in recipes} == generated_pages.keys() - {"README.md", "zoo.json"}
    for name in recipes:
        data = ModelCard(generated_pages[f"{name}.md"]).data
        assert data.library_name == ("diffusers" if "dit" in name else "transformers") and "crosshead" in data.tags
        assert list(faults(generated_pages[f"{name}.md"])) == []
        if not (CARDS / zoo.MEASURED / name).exists():
            assert data.eval_results is None and generated_pages[f"{name}.md"].count(NOT_MEASURED) >= 2, name


def test_readme_links_every_page(generated_pages):
    linked = set(re.findall(r"\]\(([\w./-]+\.md)\)", generated_pages["README.md"]))
    assert linked == generated_pages.keys() - {"README.md", "zoo.json"}


def test_zoo_command_lists_models(run_cli):
    status, out, err = run_cli("zoo")
    assert (status, err) == (0, "")
    rows = out.splitlines()
    content = json.loads((CARDS / "zoo.json").read_text())["models"]
    assert len(rows) == 1 + len(content) and rows[0].startswith("model")
    assert all(entry["recipe"] in row for entry, row in zip(content, rows[1:], strict=True))
    assert json.loads(run_cli("zoo --json")[1]) == content


def test_measurements_are_shown_on_pages(tmp_path, few_recipes):
    folder = tmp_path / "measured/small/smollm2_knocking"
    folder.mkdir(parents=True)
    (folder / "training.json").write_text(json.dumps(training()))
    results = model_results(Path("made"), Path("eval.json"), report("made"))
    (folder / "evaluation.json").write_text(json.dumps({"evaluations": [results]}))
    pages = zoo.zoo_pages(entries(tmp_path))
    row = next(row for row in pages["README.md"].splitlines() if "small/smollm2_knocking" in row)
    measured = row.split(" | ")[-1]
    assert re.findall(r"\d+\.\d+", measured) == ["2.6250", f"{ROW['score']}", "111.40", "0.2500"]
    card = pages["small/smollm2_knocking.md"]
    assert {each.metric_value for each in ModelCard(card).data.eval_results} == {2.625, 0.9125, 111.4, 0.25}
    assert card.count(NOT_MEASURED) < pages["small/smollm2_talking.md"].count(NOT_MEASURED)


def test_short_run_is_shown_without_eval_results(tmp_path, few_recipes):
    (tmp_path / SHORT_RUNS).parent.mkdir(parents=True)
    run = {"source": 3.0, "before": 5.5, "after": 3.25, "tokens": 12_000, "tokens_a_step": 600, "learning_rate": 1e-4}
    (tmp_path / SHORT_RUNS).write_text(json.dumps({"mixture": run | {"curve": []}}))
    pages = zoo.zoo_pages(entries(tmp_path / "model_cards"))
    card = pages["small/smollm2_mixture.md"]
    (sentence,) = (line for line in card.splitlines() if "12,000 tokens" in line)
    assert all(number in sentence for number in ("600", "0.0001", "5.5000", "3.2500", "3.0000"))
    assert ModelCard(card).data.eval_results is None
    assert "12,000 tokens" not in pages["small/smollm2_explicit.md"] + pages["small/smollm2_talking.md"]
    row = next(row for row in pages["README.md"].splitlines() if "small/smollm2_mixture" in row)
    assert "3.2500" in row and "12,000 tokens" in row


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ("zoo --write nowhere", 1, "nowhere"),
        ("zoo --jsn", 2, "--json"),
        ("zoo small", 2, "(small)"),
    ],
)
def test_wrong_arguments_are_refused(run_cli, command, status, words):
    exit_status, out, err = run_cli(command)
    assert (exit_status, out) == (status, "") and words in err


def test_multi_stage_recipe_names_base_model_and_commands():
    entry_of = {entry["recipe"]: entry for entry in zoo.read_zoo()}
    stages = entry_of["papers/mea_qwen3_30b_full"]
    assert stages["base_model"] == "Qwen/Qwen3-30B-A3B"
    assert [command.split()[1] for command in stages["convert"]] == ["convert", "train"]
    assert entry_of["papers/moh_llama3_8b_stage2"]["base_model"] == "meta-llama/Meta-Llama-3-8B"
    steps = entry_of["papers/moh_llama3_8b_stage2"]["convert"]
    assert [command.split()[1] for command in steps] == ["convert", "train", "fold", "convert"]
