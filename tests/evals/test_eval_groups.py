"""Scores of task groups: weights, items, shots and direction agree with the harness."""

import pytest

from crosshead.evals.harness.scores import items_of, ratio, score_rows
from crosshead.evals.harness.tasks import Benchmark, LoadedBenchmark

RIGHT = {"six": {"acc": [1, 0, 1, 1, 0, 1], "acc_norm": [1, 1, 1, 0, 0, 0]}, "two": {"acc": [0, 1]}}
"""Score of each item, by task and metric; one task lacks a metric."""


def scored(results, by_size, aggregate):
    """Return the harness's scores of a group of tasks with these per-item results, the group, and its samples."""
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task
    from lm_eval.config.group import AggMetricConfig

    class Scored(Task):
        task_name = ""  # instead of the base class's property

        def __init__(self, name):
            self.task_name = name

        def aggregation(self):
            return aggregate

    Scored.__abstractmethods__ = frozenset()
    metrics = {metric for per_metric in results.values() for metric in per_metric}
    group = Group("group", aggregate_metric_list=[AggMetricConfig(each, weight_by_size=by_size) for each in metrics])
    tasks, samples, scores = [Scored(name) for name in results], {}, {}
    for task in tasks:
        group.add(task)
        per_metric = results[task.task_name]
        size = len(next(iter(per_metric.values())))
        samples[task.task_name] = [
            {"filter": "none"} | {metric: values[index] for metric, values in per_metric.items()}
            for index in range(size)
        ]
        made = {f"{metric},none": aggregate[metric](values) for metric, values in per_metric.items()}
        scores[task.task_name] = made | {"sample_len": size}
    return group.aggregate(scores), LoadedBenchmark(Benchmark("group", "group"), group, tasks), samples


@pytest.mark.parametrize("by_size", [True, False])
def test_group_items_exclude_tasks_without_the_metric(by_size):
    from lm_eval.api.metrics import mean

    scores, group, samples = scored(RIGHT, by_size, {"acc": mean, "acc_norm": mean})
    for metric, count in (("acc", 8), ("acc_norm", 6)):
        items = items_of(group, samples, metric, "none")
        assert len(items.values) == count
        assert ratio(items.values, items.weights) == pytest.approx(scores[f"{metric},none"])


@pytest.mark.parametrize("by_size", [True, False])
def test_item_weights_reproduce_the_group_score(by_size):
    from lm_eval.api.metrics import bits_per_byte, weighted_perplexity

    results = {"short": [(-9.0, 4), (-30.0, 20)], "long": [(-200.0, 90), (-140.0, 75), (-8.0, 5)]}
    both = {name: {"bits_per_byte": pairs, "perplexity": pairs} for name, pairs in results.items()}
    aggregate = {"bits_per_byte": bits_per_byte, "perplexity": weighted_perplexity}
    scores, group, samples = scored(both, by_size, aggregate)
    items = items_of(group, samples, "bits_per_byte", "none")
    assert ratio(items.values, items.weights) == pytest.approx(scores["bits_per_byte,none"])
    assert items_of(group, samples, "perplexity", "none") is None  # a mean of exponentials


@pytest.mark.parametrize(("shots", "common"), [((5, 5), 5), ((5, 0), None)])
def test_group_shots_and_direction_come_from_its_tasks(shots, common):
    """The harness reports neither for a group whose members are groups."""
    from lm_eval.api.metrics import mean

    names, lower = ("one", "other"), {"loss": False}
    scores, group, samples = scored({name: {"loss": [1, 2, 4]} for name in names}, True, {"loss": mean})
    results = {"results": {"group": scores}, "samples": samples, "truncated": dict.fromkeys(names, 0)}
    results |= {"n-shot": dict(zip(names, shots, strict=True)), "higher_is_better": dict.fromkeys(names, lower)}
    ((row, _),) = score_rows([group], results)
    assert (row["shots"], row["higher_is_better"]) == (common, False)
