"""Comparisons on few items use Student's t; one item has no interval; scores are saved before the comparison."""

import json

import datasets
import pytest

import toys
from broken import run
from crosshead.evals.harness import evaluate as evaluating
from crosshead.evals.harness.report import eval_lines
from crosshead.evals.harness.scores import Items, difference, t_quantile
from toy_eval import ITEMS, ROLLING, write_scorable, write_task


@pytest.mark.parametrize(("count", "expected"), [(2, 12.7062), (3, 4.3027), (4, 3.1824), (6, 2.5706)])
def test_t_quantiles_of_few_items(count, expected):
    assert t_quantile(count) == pytest.approx(expected, abs=1e-4)


def test_perplexity_of_one_item_has_no_interval():
    first, second = Items([10.0], [5.0], True), Items([11.0], [5.0], True)
    change = difference(first, second, False)
    assert change["change"] == pytest.approx(2.718281828 ** (1 / 5) - 1)
    assert (change["interval"], change["verdict"], change["items"]) == (None, "unclear", 1)
    assert difference(first, first, False)["verdict"] == "equal"


def test_wide_interval_is_finite():
    first, second = Items([1.0, 1.0], [1.0, 1.0], True), Items([500.0, 1.0], [1.0, 1.0], True)
    change = difference(first, second, False)
    assert json.loads(json.dumps(change, allow_nan=False)) == change


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home directory with two models."""
    folder = tmp_path_factory.mktemp("home")
    write_scorable(toys.stock_model("Llama"), folder / "first")
    write_scorable(toys.stock_model("Qwen3"), folder / "second")
    return folder


@pytest.fixture
def run_cli(home, tmp_path, capfd, monkeypatch):
    """A function that runs a command in a folder with a one-item task, with HOME set to `home`."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    write_task(tmp_path / "mine", "prose", ROLLING, ITEMS[:1])
    return lambda command: run(capfd, monkeypatch, command)


EVAL = "eval ~/first ~/second --tasks prose --include-path mine --compare"


def test_card_from_one_item_scores_of_models_under_home(run_cli, home, tmp_path):
    status, out, err = run_cli(EVAL)
    assert (status, err) == (0, "")
    report = json.loads((tmp_path / "eval.json").read_text())
    assert out.splitlines()[:-1] == list(eval_lines(report))
    assert {row["verdict"] for row in report["compared"][0]["scores"]} == {"unclear"}
    names = [model["model"] for model in report["models"]]
    assert names == [report["compared"][0]["first"], report["compared"][0]["second"]]
    fingerprints = [model["fingerprint"] for model in report["models"]]
    assert len(set(fingerprints)) == 2 and None not in fingerprints
    (home / "second").rename(home / "moved")
    status, _, err = run_cli(f"card {home}/moved --eval eval.json")
    assert (status, err) == (0, "")
    record = json.loads((home / "moved/evaluation.json").read_text())["evaluations"][0]
    assert record["scores"] == report["models"][1]["scores"]
    assert record["compared"]["with"] == "first"


def test_scores_are_saved_before_a_failing_comparison(monkeypatch):
    saved = []

    def failing(*arguments):
        raise ZeroDivisionError("the comparison")

    monkeypatch.setattr(evaluating, "open_model", lambda name, trust: evaluating.Opened(name, None, None))
    monkeypatch.setattr(evaluating, "_check_special_tokens", lambda opened: None)
    monkeypatch.setattr(evaluating, "parameter_count", lambda opened: 1)
    monkeypatch.setattr(evaluating, "load_tasks", lambda *arguments: [])
    monkeypatch.setattr(evaluating, "_score", lambda opened, *rest: ({"model": opened.name, "scores": []}, []))
    monkeypatch.setattr(evaluating, "compare", failing)
    with pytest.raises(ZeroDivisionError):
        evaluating.evaluate(["a", "b"], "offline", compared=True, save=lambda report: saved.append(json.dumps(report)))
    assert [model["model"] for model in json.loads(saved[-1])["models"]] == ["a", "b"]
