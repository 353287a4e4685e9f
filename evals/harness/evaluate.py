"""Scores models on the tasks of lm-evaluation-harness, and compares them item by item."""

import gc
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from crosshead.common.errors import EvalError
from crosshead.common.fingerprint import model_fingerprint

from ..open_model import Opened, load_model, open_model
from .lm_eval_model import quiet, run_harness
from .scores import CONFIDENCE, Items, average, compare, score_rows
from .tasks import LoadedBenchmark, load_tasks, read_suite, suite_of_tasks

PACKAGES = ("crosshead", "lm_eval", "transformers", "torch")
"""Scores depend on their versions, and on Python's."""


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
    progress: Callable[[str], None] = lambda message: None,
    save: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """Score each model on a suite, or on `tasks`; with `compared`, compare each later model with the first.

    `limit` is the number of items of each task, from the first. The report can be written as JSON. `save` is called
    with the present report after each model and each comparison, so that a later failure loses no scores.
    """
    chosen = suite_of_tasks(tasks) if tasks else read_suite(suite)
    limit = limit if limit is not None else chosen.limit
    _check_options(models, limit, batch_size, compared)
    with quiet():
        opened = [open_model(name, trust_remote_code) for name in models]
        for each in opened:
            _check_special_tokens(each)
        progress("loading the tasks")
        benchmarks = load_tasks(chosen.benchmarks, include_path, confirm_run_unsafe_code)
        report: dict[str, Any] = {
            "suite": {"name": chosen.name, "source": chosen.source, "missing": list(chosen.missing)},
            "limit": limit,
            "batch_size": batch_size,
            "versions": {name: version(name) for name in PACKAGES} | {"python": platform.python_version()},
            "models": [],
            "confidence": CONFIDENCE,
            "compared": [],
        }
        items: list[list[Items | None]] = []
        for each in opened:
            progress(f"scoring {each.name}")
            scores, found = _score(each, benchmarks, batch_size, limit)
            report["models"].append(scores)
            items.append(found)
            save(report)  # before the comparison, which may fail
            if compared and len(items) > 1:
                changes = compare(report["models"][0]["scores"], items[0], found)
                report["compared"].append({"first": opened[0].name, "second": each.name, **changes})
                save(report)
    return report


def _check_options(models: Sequence[str], limit: int | None, batch_size: int | str, compared: bool) -> None:
    if compared and len(models) < 2:
        raise EvalError("a comparison needs two models or more")
    if limit is not None and limit < 1:
        raise EvalError(f"limit={limit} is not allowed: use at least 1 item")
    if batch_size != "auto" and (isinstance(batch_size, str) or batch_size < 1):
        raise EvalError(f"batch_size={batch_size!r} is not allowed: use auto, or at least 1")


def _check_special_tokens(opened: Opened) -> None:
    if opened.tokenizer.bos_token_id is None and opened.tokenizer.eos_token_id is None:
        raise EvalError(
            f"the tokenizer of {opened.name} has neither bos_token nor eos_token: a text must start with one of them"
        )


def _score(
    opened: Opened, benchmarks: Sequence[LoadedBenchmark], batch_size: int | str, limit: int | None
) -> tuple[dict[str, Any], list[Items | None]]:
    """The report of one model, and the items behind its rows; the model is unloaded afterwards."""
    model, folder = load_model(opened), Path(opened.name)
    fingerprint = model_fingerprint(folder) if folder.is_dir() else None
    results = run_harness(model, opened.tokenizer, benchmarks, batch_size, limit)
    rows = score_rows(benchmarks, results)
    scores = [row for row, _ in rows]
    report = {
        "model": opened.name,
        "fingerprint": fingerprint,
        "model_type": opened.config.model_type,
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "context": results["context"],
        "scores": scores,
        "average": average(scores) if all(each.benchmark.metric for each in benchmarks) else None,
        "task_versions": {name: str(found) for name, found in results["versions"].items()},
    }
    del model
    gc.collect()  # the harness keeps it in reference cycles
    return report, [items for _, items in rows]
