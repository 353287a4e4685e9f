"""`crosshead eval` on toy models: scores, comparisons, and the same scores by plain lm_eval."""

import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import torch
import yaml

import toys
from broken import run
from crosshead.evals.harness import report as eval_report
from crosshead.evals.harness.evaluate import evaluate
from crosshead.evals.harness.report import eval_lines
from crosshead.evals.harness.tasks import TASKS
from toy_eval import CHOICE, ITEMS, ROLLING, WORD, WRITTEN, trained_model, write_scorable, write_task

LIMIT = 24
PLAIN = """
import sys
sys.modules["crosshead"] = None  # crosshead cannot be imported
from lm_eval.__main__ import cli_evaluate
cli_evaluate()
"""


pytestmark = pytest.mark.xdist_group("eval")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A stock model that was trained a little, the same with its last layer zeroed, and a model with mechanisms."""
    folder = tmp_path_factory.mktemp("models")
    model = trained_model()
    write_scorable(model, folder / "trained")
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.zero_()
        model.model.layers[1].mlp.down_proj.weight.zero_()
    write_scorable(model, folder / "zeroed")
    write_scorable(toys.mixed_model("Qwen3", {"knocking": {}, "mixture": {"active_heads": 3}}), folder / "ours")
    return folder


@pytest.fixture
def workdir(models, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for model in models.iterdir():
        (tmp_path / model.name).symlink_to(model)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def evaluated(workdir, capfd, monkeypatch):
    """A function that runs `crosshead eval` and returns the report and the printed table."""

    def ask(command):
        status, out, err = run(capfd, monkeypatch, f"eval {command} --overwrite")
        assert (status, err) == (0, "")
        return json.loads((workdir / "eval.json").read_text()), out

    return ask


def scores(report, model=0):
    return {(row["task"], row["metric"]): row for row in report["models"][model]["scores"]}


def changes(report, later=0):
    return {(row["task"], row["metric"]): row for row in report["compared"][later]["scores"]}


@pytest.fixture(scope="module")
def compared(models, tmp_path_factory):
    """The report on four models, the last of which is the first one again."""
    names = [str(models / name) for name in ("trained", "zeroed", "ours", "trained")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        return evaluate(names, "offline", limit=LIMIT, compared=True)


def test_table_matches_report(compared):
    assert [Path(model["model"]).name for model in compared["models"]] == ["trained", "zeroed", "ours", "trained"]
    assert [model["model_type"] for model in compared["models"]] == ["llama", "llama", "crosshead_qwen3", "llama"]
    row = scores(compared)["crosshead_grammar", "acc"]
    assert (row["items"], row["shots"], row["items_cut"], compared["limit"]) == (LIMIT, 0, 0, LIMIT)
    assert row["standard_error"] == pytest.approx((row["score"] * (1 - row["score"]) / (LIMIT - 1)) ** 0.5)
    change = changes(compared)["crosshead_grammar", "acc"]
    assert change["change"] == pytest.approx(scores(compared, 1)["crosshead_grammar", "acc"]["score"] - row["score"])
    table = "\n".join(eval_lines(compared))
    for number in (row["score"], row["standard_error"], change["change"], *change["interval"]):
        assert f"{abs(number):.4f}" in table


def test_comparison_of_a_model_with_itself_is_equal(compared):
    rows = changes(compared, 2)
    for row in rows.values():
        assert (row["change"], row["items_that_differ"], row["verdict"]) == (0, 0, "equal")
    assert rows["crosshead_prose", "word_perplexity"]["interval"] == [0, 0]
    assert "equal" in "\n".join(eval_lines(compared))


def test_zeroed_layer_gives_verdict_worse(compared):
    row = changes(compared)["crosshead_prose", "word_perplexity"]
    assert row["verdict"] == "worse"
    assert row["interval"][0] > 0.02
    assert row["items_that_differ"] == row["items"] == LIMIT


def test_random_model_is_at_chance_and_trained_model_beats_it(compared):
    trained, random = scores(compared), scores(compared, 2)
    row = random["crosshead_grammar", "acc"]
    assert abs(row["score"] - 0.5) < 3 * row["standard_error"]
    assert (
        trained["crosshead_prose", "word_perplexity"]["score"] < random["crosshead_prose", "word_perplexity"]["score"]
    )


@pytest.mark.slow
def test_plain_lm_eval_gives_the_same_scores(workdir, evaluated):
    """On a folder with remote code, at the same batch size, since sums round differently at another one."""
    report, _ = evaluated("ours --suite offline --batch-size 1")
    task_options = ["--tasks", "crosshead_grammar,crosshead_prose", "--include_path", str(TASKS), "--batch_size", "1"]
    model = ["--model", "hf", "--model_args", "pretrained=ours,trust_remote_code=True", "--device", "cpu"]
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(workdir / "home")}
    command = [sys.executable, "-P", "-c", PLAIN, *model, *task_options, "--output_path", "plain"]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = (workdir / "plain").rglob("*.json")
    plain = json.loads(file.read_text())["results"]
    for (task, metric), row in scores(report).items():
        assert plain[task][f"{metric},none"] == row["score"]
    assert (
        plain["crosshead_grammar"]["acc_stderr,none"] == scores(report)["crosshead_grammar", "acc"]["standard_error"]
    )


def test_scores_do_not_depend_on_batch_size(evaluated):
    one, _ = evaluated("trained --suite offline --limit 12 --batch-size 1")
    many, _ = evaluated("trained --suite offline --limit 12 --batch-size auto")
    for key, row in scores(one).items():
        assert scores(many)[key]["score"] == pytest.approx(row["score"], rel=1e-4)


def test_user_defined_tasks(workdir, evaluated):
    write_task(workdir / "mine", "my_choice", CHOICE, num_fewshot=2, fewshot_split="test")
    write_task(workdir / "mine", "my_prose", ROLLING)
    write_task(workdir / "mine", "my_word", WORD)
    write_task(workdir / "mine", "my_text", WRITTEN, generation_kwargs={"until": ["."], "max_gen_toks": 5})
    command = "trained zeroed --tasks my_choice,my_prose,my_word,my_text --include-path mine --compare"
    report, _ = evaluated(command)
    rows = scores(report)
    perplexities = {("my_prose", name) for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")}
    others = {("my_choice", "acc"), ("my_choice", "acc_norm"), ("my_word", "perplexity"), ("my_word", "acc")}
    assert rows.keys() == perplexities | others | {("my_text", "exact_match")}
    assert changes(report).keys() == rows.keys()
    assert rows["my_choice", "acc"]["shots"] == 2
    assert all(row["standard_error"] is not None for row in rows.values())
    assert {row["items"] for row in rows.values()} == {len(ITEMS)}
    assert report["suite"]["name"] == "tasks"
    assert report["compared"][0]["left_out"] == []
    again, _ = evaluated(command)
    assert again == report


def test_metrics_that_are_not_means_are_not_compared(workdir, evaluated):
    metrics = [
        {"metric": name, "aggregation": how, "higher_is_better": True}
        for name, how in (("acc", "mean"), ("acc_norm", "median"))
    ]
    write_task(workdir / "mine", "yes_or_no", CHOICE, ITEMS[:2], metric_list=metrics)
    report, out = evaluated("trained zeroed --tasks yes_or_no --include-path mine --compare")
    assert changes(report).keys() == {("yes_or_no", "acc")}
    (line,) = (line for line in out.splitlines() if "not compared" in line)
    assert "yes_or_no" in line and "acc_norm" in line


def test_items_beyond_the_context_are_counted_as_cut(workdir, evaluated):
    items = [{"text": "a b c " * 40 * count, "choices": ["x", "y"], "label": 0} for count in (1, 1, 4)]
    write_task(workdir / "mine", "long", CHOICE, items)
    report, out = evaluated("trained --tasks long --include-path mine")
    assert [row["items_cut"] for row in scores(report).values()] == [1, 1]
    lines = [line for line in out.splitlines() if "1 of 3" in line]
    assert len(lines) == 1 and all("long" in line and "trained" in line and "512" in line for line in lines)
    assert out.splitlines()[:-1] == list(eval_lines(report)) and "eval.json" in out.splitlines()[-1]


def test_large_perplexity_change_is_shown_as_a_factor():
    row = {"change": 41.0, "interval": [9.0, 50.0], "scale": "part of the first"}
    assert eval_report._change(row) == "x42  [+900.00%, x51]"


def test_json_option_prints_only_the_report(workdir, capfd, monkeypatch):
    status, out, err = run(capfd, monkeypatch, "eval trained --suite offline --limit 2 --json --out other.json")
    assert (status, err) == (0, "")
    assert json.loads(out) == json.loads((workdir / "other.json").read_text())


@pytest.mark.slow
def test_group_scores_follow_weight_by_size(workdir, evaluated):
    """The differences between two models are weighted like the scores."""
    write_task(workdir / "mine", "six", CHOICE)
    write_task(workdir / "mine", "two", CHOICE, ITEMS[1:3])
    for name, by_size in (("by_size", True), ("by_task", False), ("apart", None)):
        metrics = [{"metric": "acc", "aggregation": "mean", "weight_by_size": by_size}]
        group = {
            "group": name,
            "task": ["six", "two"],
            **({} if by_size is None else {"aggregate_metric_list": metrics}),
        }
        (workdir / "mine" / f"{name}.yaml").write_text(yaml.safe_dump(group))
    reports = {}
    for name in ("by_size", "by_task", "apart"):
        reports[name], _ = evaluated(f"trained zeroed --tasks {name} --include-path mine --compare")
    apart = [scores(reports["apart"], model) for model in (0, 1)]
    assert apart[0].keys() == {(task, metric) for task in ("six", "two") for metric in ("acc", "acc_norm")}
    six, two = ([model[task, "acc"]["score"] for model in apart] for task in ("six", "two"))
    for name, weights in (("by_size", (6 / 8, 2 / 8)), ("by_task", (1 / 2, 1 / 2))):
        expected = [weights[0] * one + weights[1] * other for one, other in zip(six, two, strict=True)]
        rows = [scores(reports[name], model)[name, "acc"] for model in (0, 1)]
        assert [row["score"] for row in rows] == pytest.approx(expected)
        assert [row["items"] for row in rows] == [8, 8]
        assert changes(reports[name])[name, "acc"]["change"] == pytest.approx(expected[1] - expected[0])
