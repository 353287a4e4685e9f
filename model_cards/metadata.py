"""Creates the metadata of a card, which the Hub reads: base model, datasets, licence, tags and results."""

from collections.abc import Iterator, Mapping
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from .commands import datasets
from .facts import Facts, Json
from .papers import described
from .tables import metric_name
from .tasks import Task, task_of

HARNESS = ("lm-evaluation-harness", "https://github.com/EleutherAI/lm-evaluation-harness")
"""Name and URL of the source of benchmark results."""
LICENCE_KEYS = ("license", "license_name", "license_link")
"""Licence keys of the metadata."""
HELD_OUT = ("held-out", "held-out data of the training run")
"""Type and name of the dataset for the held-out loss."""


def card_metadata(facts: Facts) -> ModelCardData:
    """The metadata in the class of the Hub's client."""
    measured = list(results(facts))
    licence: dict[str, Any] = dict(facts.licence)
    training_data = list(dict.fromkeys(datasets(facts.training.get("recipe", {}))))
    return ModelCardData(
        base_model=facts.base_model,
        datasets=training_data or None,
        library_name=task_of(facts.config).library,
        pipeline_tag=task_of(facts.config).pipeline,
        tags=tags(facts),
        model_name=facts.name if measured else None,
        eval_results=measured or None,
        **licence,
    )


def licence_of(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The licence in the metadata of a card; empty unless `license` is a text."""
    if not isinstance(metadata.get("license"), str):
        return {}
    return {key: metadata[key] for key in LICENCE_KEYS if isinstance(metadata.get(key), str)}


def tags(facts: Facts) -> list[str]:
    """The tags: crosshead, the mechanisms, their papers, and `custom_code` if loading runs code from the folder."""
    known = described(facts.mixers)
    papers = [f"arxiv:{mechanism.arxiv}" for mechanism in known.values() if mechanism.arxiv]
    return ["crosshead", *known, *papers, *(["custom_code"] if facts.remote_code else [])]


def results(facts: Facts) -> Iterator[EvalResult]:
    """The benchmark scores and the held-out loss of this model."""
    task = task_of(facts.config)
    for evaluation in facts.evaluations:
        yield from (_score(row, evaluation, task) for row in evaluation["scores"])
    loss = facts.training.get("metrics", {}).get("eval_loss")
    if isinstance(loss, int | float):
        yield EvalResult(
            task_type=task.pipeline,
            task_name=task.title,
            dataset_type=HELD_OUT[0],
            dataset_name=HELD_OUT[1],
            metric_type="loss",
            metric_value=loss,
        )


def _score(row: Json, evaluation: Json, task: Task) -> EvalResult:
    """One score; few-shot count and item limit are dataset arguments, so the Hub keeps results with others apart."""
    arguments: dict[str, Any] = {} if row["shots"] is None else {"num_few_shot": row["shots"]}
    if evaluation["limit"] is not None:
        arguments["limit"] = evaluation["limit"]
    source = (None, None) if evaluation.get("data") else HARNESS
    return EvalResult(
        task_type=task.pipeline,
        task_name=task.title,
        dataset_type=row["task"],
        dataset_name=row["name"],
        dataset_args=arguments or None,
        metric_type=row["metric"],
        metric_name=metric_name(row),
        metric_value=row["score"],
        source_name=source[0],
        source_url=source[1],
    )
