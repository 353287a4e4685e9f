"""A card shows the scores of a model on a user's own data."""

import json

import pytest
from huggingface_hub import ModelCard

import crosshead
import scoring_toys
from broken import run
from crosshead.model_cards.commands import HUB_NAME
from image_toys import write_image_model
from scoring_toys import labelled, write_class_folders, write_rows


@pytest.fixture
def run_cli(capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def ask(command):
        status, out, err = run(capfd, monkeypatch, command)
        assert (status, err) == (0, ""), err
        return out

    return ask


def results(folder):
    """Return the evaluation results of the card by metric type, as the Hub parses them."""
    return {each.metric_type: each for each in ModelCard.load(folder / "README.md").data.eval_results}


def rows(folder):
    """Return the cells of each row of the score table, by metric."""
    lines = [line.strip("| ").split(" | ") for line in (folder / "README.md").read_text().splitlines() if "| " in line]
    return {cells[1]: cells for cells in lines if len(cells) > 4}


def test_card_scores_of_classifier_compared_with_source(run_cli, tmp_path):
    scoring_toys.write_classifier(tmp_path / "source", num_labels=2, max_position_embeddings=8)
    crosshead.convert("source", "made", {"knocking": {}}, verify=False)
    write_rows(tmp_path / "my+rows.tsv", labelled(scoring_toys.classes(24, 2)))
    run_cli("eval source made --data my+rows.tsv --compare --limit 20")
    report = json.loads((tmp_path / "eval.json").read_text())
    run_cli("card made --eval eval.json")
    text = (tmp_path / "made" / "README.md").read_text()
    assert "sequence classification on `my+rows.tsv`, 20 items:" in text and "lm-evaluation-harness" not in text
    assert "their end was removed" in text
    scores = results(tmp_path / "made")
    accuracy = report["models"][1]["scores"][0]
    assert scores["accuracy"].metric_value == accuracy["score"]
    assert scores["accuracy"].task_type == "text-classification"
    assert (scores["accuracy"].dataset_type, scores["accuracy"].dataset_name) == ("my_rows.tsv", "my+rows.tsv")
    assert scores["accuracy"].dataset_args == {"limit": 20} and scores["accuracy"].source_name is None
    assert scores.keys() == {"accuracy", "f1", "matthews_correlation", "loss"}
    cells = rows(tmp_path / "made")["accuracy"]
    assert cells[4].startswith(f"{accuracy['score']:.4f} ± ") and cells[-1].endswith("equal")
    record = json.loads((tmp_path / "made" / "evaluation.json").read_text())["evaluations"][0]
    assert record["data"] == report["data"] and record["scores"] == report["models"][1]["scores"]
    run_cli("card made")  # again, from evaluation.json


@pytest.mark.slow
def test_card_scores_of_image_classifier(run_cli, tmp_path):
    write_image_model(tmp_path / "source")
    crosshead.convert("source", "made", {"talking": {}}, verify=False)
    write_class_folders(tmp_path / "images", ["0", "1", "2"])
    run_cli("eval made --data images")
    run_cli("card made --eval eval.json")
    scores = results(tmp_path / "made")
    assert scores["accuracy"].task_type == "image-classification" and scores.keys() == {"accuracy", "loss"}
    assert "image classification on `images`:" in (tmp_path / "made" / "README.md").read_text()


@pytest.mark.slow
def test_card_scores_of_masked_language_model(run_cli, tmp_path):
    scoring_toys.write_masked(tmp_path / "source")
    crosshead.convert("source", "made", {"gating": {}}, verify=False)
    scoring_toys.write_prose(tmp_path / "text.txt", 60)
    run_cli("eval made --data text.txt")
    run_cli("card made --eval eval.json")
    assert results(tmp_path / "made").keys() == {"loss", "perplexity", "accuracy"}
    run_cli("push made me/made --dry-run")


@pytest.mark.parametrize("name", ["données.tsv", ".dev.tsv"])
def test_task_name_of_any_file_is_valid_on_the_hub(name, run_cli, tmp_path):
    scoring_toys.write_classifier(tmp_path / "made", num_labels=2)
    write_rows(tmp_path / name, labelled(scoring_toys.classes(6, 2)))
    run_cli(f"eval made --data {name}")
    report = json.loads((tmp_path / "eval.json").read_text())
    (task,) = {score["task"] for score in report["models"][0]["scores"]}
    assert report["data"]["name"] == name and task.isascii() and HUB_NAME.fullmatch(task)
