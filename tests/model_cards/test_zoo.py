"""The zoo's pages are those that the command writes, and list every shipped recipe."""

import json
import re
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

import crosshead.model_cards.zoo as zoo
from broken import run
from card_toys import ROW, report, training
from crosshead.model_cards.evaluations import kept, scored_here
from crosshead.recipes.load_recipe import shipped_recipes
from crosshead_command.zoo import SHORT_RUNS, entries
from hub_rules import faults

CARDS = Path(__file__).resolve().parents[2] / "model_cards"


@pytest.fixture(scope="module")
def made():
    """What the command writes now."""
    return zoo.zoo_pages(entries(CARDS))


@pytest.fixture
def line(capfd, monkeypatch):
    return lambda command: run(capfd, monkeypatch, command)


def test_the_pages_are_up_to_date(made):
    there = {path.relative_to(CARDS).as_posix(): path.read_text() for path in CARDS.rglob("*.md")}
    stale = {
        name for name in made | there if (there | {zoo.ZOO: (CARDS / zoo.ZOO).read_text()}).get(name) != made[name]
    }
    assert not stale, "run `crosshead zoo --write model_cards`"


def test_every_recipe_has_a_card_that_the_hub_would_take(made):
    recipes = {name for name, path in shipped_recipes().items() if "\nsweep:" not in path.read_text()}
    assert {f"{name}.md" for name in recipes} == made.keys() - {"README.md", "zoo.json"}
    for name in recipes:
        data = ModelCard(made[f"{name}.md"]).data
        assert data.library_name == "transformers" and "crosshead" in data.tags
        assert list(faults(made[f"{name}.md"])) == []
        if not (CARDS / zoo.MEASURED / name).exists():
            assert data.eval_results is None and made[f"{name}.md"].count("not measured") >= 2, name


def test_every_page_is_linked(made):
    linked = set(re.findall(r"\]\(([\w./-]+\.md)\)", made["README.md"]))
    assert linked == made.keys() - {"README.md", "zoo.json"}


def test_the_list(line):
    status, out, err = line("zoo")
    assert (status, err) == (0, "")
    rows = out.splitlines()
    content = json.loads((CARDS / "zoo.json").read_text())["models"]
    assert len(rows) == 1 + len(content) and rows[0].startswith("model")
    assert all(entry["recipe"] in row for entry, row in zip(content, rows[1:], strict=True))
    assert json.loads(line("zoo --json")[1]) == content


def test_what_was_measured_shows(tmp_path):
    folder = tmp_path / "measured/small/smollm2_knocking"
    folder.mkdir(parents=True)
    (folder / "training.json").write_text(json.dumps(training()))
    found = scored_here(Path("made"), Path("eval.json"), report("made"))
    (folder / "evaluation.json").write_text(json.dumps(kept([found])))
    pages = zoo.zoo_pages(entries(tmp_path))
    row = next(row for row in pages["README.md"].splitlines() if "small/smollm2_knocking" in row)
    assert row.endswith(
        f"held-out loss 2.6250, grammar acc {ROW['score']}, prose word_perplexity 111.40, grammar acc 0.2500 |"
    )
    card = pages["small/smollm2_knocking.md"]
    assert {each.metric_value for each in ModelCard(card).data.eval_results} == {2.625, 0.9125, 111.4, 0.25}
    assert "Training: not measured" not in card and "Training: not measured" in pages["small/smollm2_talking.md"]


def test_a_short_run_shows_as_one(tmp_path):
    (tmp_path / SHORT_RUNS).parent.mkdir(parents=True)
    run = {"source": 3.0, "before": 5.5, "after": 3.25, "tokens": 12_000, "tokens_a_step": 600, "learning_rate": 1e-4}
    (tmp_path / SHORT_RUNS).write_text(json.dumps({"mixture": run | {"curve": []}}))
    pages = zoo.zoo_pages(entries(tmp_path / "model_cards"))
    card = pages["small/smollm2_mixture.md"]
    assert "A short run, of 12,000 tokens, 600 a step, at a learning rate of 0.0001" in card
    assert "loss on held-out text 5.5000 when it was converted, 3.2500 afterwards; the source's is 3.0000." in card
    assert (
        "have not been tried at this size, beyond that short run." in card
        and ModelCard(card).data.eval_results is None
    )
    assert "short run" not in pages["small/smollm2_explicit.md"] + pages["small/qwen3_0.6b_mixture.md"]
    row = next(row for row in pages["README.md"].splitlines() if "small/smollm2_mixture" in row)
    assert row.endswith("| held-out loss 3.2500 after 12,000 tokens |")


def test_writing(tmp_path, line):
    place = tmp_path / "model_cards"
    for name in ("model_cards/small", "model_cards/measured", "evals/results"):
        if (CARDS.parent / name).exists():
            shutil.copytree(CARDS.parent / name, tmp_path / name)
    (place / "small/old_recipe.md").write_text("gone")
    status, _, err = line(["zoo", "--write", str(place)])
    assert (status, err) == (0, "") and not (place / "small/old_recipe.md").exists()
    assert (place / "README.md").read_text() == (CARDS / "README.md").read_text()
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ("zoo --write nowhere", 1, "nowhere is no folder: make it first"),
        ("zoo --jsn", 2, "--json"),
        ("zoo small", 2, "unexpected extra argument"),
    ],
)
def test_wrong_uses(line, command, status, words):
    found, out, err = line(command)
    assert (found, out) == (status, "") and words in err
