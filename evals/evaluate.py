"""Score models on tasks of lm-evaluation-harness, and compare them item by item."""

import gc
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .errors import EvalError
from .eval_compare import compare
from .eval_harness import run_harness
from .eval_items import CONFIDENCE, Items
from .eval_model import Opened, load_model, open_model
from .eval_quiet import quiet
from .eval_scores import average, score_rows
from .eval_suite import Suite, read_suite, suite_of_tasks
from .eval_tasks import Loaded, load_tasks, task_manager

PACKAGES = ("crosshead", "lm_eval", "transformers", "torch")
"""What scores depend on besides the model, Python apart."""


def evaluate(
    models: Sequence[str],
    suite: str = "quick",
    *,
    tasks: Sequence[str] = (),
    include_path: Path | None = None,
    limit: int | None = None,
    batch_size: int | str = "auto",
    compared: bool = False,
    trust_remote_code: bool = False,
    confirm_run_unsafe_code: bool = False,
    tell: Callable[[str], None] = lambda told: None,
) -> dict[str, Any]:
    """Score each model on a suite, or on `tasks`; with `compared`, each later model is set against the first.

    `limit` is the number of items of each task, from its beginning. The report can be written as JSON.
    """
    chosen = suite_of_tasks(list(tasks)) if tasks else read_suite(suite)
    limit = limit if limit is not None else chosen.limit
    _check(models, limit, batch_size, compared)
    with quiet():
        opened = [open_model(name, trust_remote_code) for name in models]
        tell("loading the tasks")
        manager = task_manager(chosen.benchmarks, include_path)
        loaded = load_tasks(manager, chosen.benchmarks, confirm_run_unsafe_code)
        scored = []
        for each in opened:
            tell(f"scoring {each.name}")
            scored.append(_score(each, loaded, batch_size, limit))
    reports, items = [report for report, _ in scored], [found for _, found in scored]
    return {
        "suite": _described(chosen),
        "limit": limit,
        "batch_size": batch_size,
        "versions": {name: version(name) for name in PACKAGES} | {"python": platform.python_version()},
        "models": reports,
        "confidence": CONFIDENCE,
        "compared": [
            {"first": models[0], "second": name, **compare(reports[0]["scores"], items[0], found)}
            for name, found in list(zip(models, items, strict=True))[1:]
            if compared
        ],
    }


def _check(models: Sequence[str], limit: int | None, batch_size: int | str, compared: bool) -> None:
    if compared and len(models) < 2:
        raise EvalError("a comparison needs two models or more")
    if limit is not None and limit < 1:
        raise EvalError(f"limit={limit} is not allowed: use a number of items from 1 up")
    if batch_size != "auto" and (isinstance(batch_size, str) or batch_size < 1):
        raise EvalError(f"batch_size={batch_size!r} is not allowed: use auto, or a number from 1 up")


def _described(suite: Suite) -> dict[str, Any]:
    return {"name": suite.name, "source": suite.source, "missing": list(suite.missing)}


def _score(
    opened: Opened, tasks: Sequence[Loaded], batch_size: int | str, limit: int | None
) -> tuple[dict[str, Any], list[Items | None]]:
    """One model's part of the report, and the items behind its rows; the model is gone afterwards."""
    model = load_model(opened)
    outcome = run_harness(model, opened.tokenizer, tasks, batch_size, limit)
    rows = score_rows(tasks, outcome)
    report = {
        "model": opened.name,
        "model_type": opened.config.model_type,
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "context": outcome.context,
        "scores": [row for row, _ in rows],
        "average": average([row for row, _ in rows]) if all(each.benchmark.metric for each in tasks) else None,
        "task_versions": {name: str(found) for name, found in outcome.results["versions"].items()},
    }
    del model
    gc.collect()  # the harness holds it in cycles
    return report, [found for _, found in rows]
