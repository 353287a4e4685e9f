"""The shipped suites have the rows and shots of the papers, and the installed harness knows their tasks."""

import pytest

from crosshead.evals.harness.tasks import TASKS, read_suite, suite_names

ROWS = {"moh-llm": 6, "moh-llama3": 14, "mea": 6, "mea-reasoning": 11, "kha": 19, "quick": 4, "offline": 2}
"""Number of rows in the papers' tables, including tasks that the harness lacks."""
SHOTS = {"MMLU": 5, "CEVAL": 5, "CMMLU": 5, "GSM8K": 8, "HellaSwag": 10, "BoolQ": 32, "NQ": 32, "ARC-C": 25}
"""Few-shot examples per benchmark of moh-llama3, as its table says; its other six benchmarks are zero-shot."""
NAMED_ELSEWHERE = {
    ("humaneval_plus", "pass@1"): "pass_at_k",
    ("mbpp", "pass_at_1"): "utils",
    ("mbpp_plus", "pass_at_1"): "utils",
}
"""(task, metric) whose metric is named in the task's code -> part of the metric's entry in the YAML."""


@pytest.fixture(scope="module")
def harness():
    """The task manager of the installed harness."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(TASKS))


def task_configs(harness, name):
    """Return the config of a task, or the configs of all tasks of a group or tag."""
    entry = harness.task_index[name]
    if entry.kind.name == "TAG":
        return [leaf for member in entry.tags for leaf in task_configs(harness, member)]
    if entry.kind.name == "GROUP":
        return [leaf for member in entry.cfg["task"] for leaf in task_configs(harness, member)]
    return [entry.cfg]


def test_suites_have_rows_and_shots_of_the_papers():
    assert {name: len(read_suite(name).benchmarks) + len(read_suite(name).missing) for name in suite_names()} == ROWS
    llama = {each.name: each.shots for each in read_suite("moh-llama3").benchmarks}
    assert {name: shots for name, shots in llama.items() if shots} == SHOTS
    for name in ("moh-llm", "mea", "offline"):
        assert {each.shots for each in read_suite(name).benchmarks} == {0}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ROWS))
def test_harness_has_every_task_and_metric(harness, name):
    for each in read_suite(name).benchmarks:
        assert each.task in harness.task_index, each.task
        for config in task_configs(harness, each.task):
            metrics = [entry["metric"] for entry in config["metric_list"]]
            named = NAMED_ELSEWHERE.get((each.task, each.metric))
            assert any(named in metric for metric in metrics) if named else each.metric in metrics, config["task"]
            filters = [entry["name"] for entry in config.get("filter_list", [])] or ["none"]
            assert each.filter in filters, config["task"]
        group = harness.task_index[each.task].cfg
        if "group" in group:
            assert each.metric in [entry["metric"] for entry in group["aggregate_metric_list"]]


@pytest.mark.slow
def test_missing_benchmarks_are_not_in_the_harness(harness):
    known = [name.lower().replace("_", "").replace("-", "") for name in harness.all_tasks]
    for suite in ("mea-reasoning", "kha"):
        for name in read_suite(suite).missing:
            lower_name = name.lower().replace("-", "").replace("hard", "")
            assert lower_name not in known
            assert name == "PHYSICS" or not any(task.startswith(lower_name) for task in known), name


@pytest.mark.slow
def test_unknown_harness_task_raises_key_error(harness):
    with pytest.raises(KeyError):
        task_configs(harness, "sciqq")
