"""Score models on tasks of lm-evaluation-harness, and compare them item by item."""

import gc
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from crosshead.common.errors import EvalError

from ..model_fingerprint import model_fingerprint
from ..open_model import Opened, load_model, open_model
from .compare import compare
from .harness import quiet, run_harness
from .items import CONFIDENCE, Items
from .scores import average, score_rows
from .suite import Suite, read_suite, suite_of_tasks
from .tasks import Loaded, load_tasks, task_manager

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
    keep: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """Score each model on a suite, or on `tasks`; with `compared`, each later model is set against the first.

    `limit` is the number of items of each task, from its beginning. The report can be written as JSON; `keep` is given
    what there is of it after every model and every comparison, so that a later failure costs no scores.
    """
    chosen = suite_of_tasks(list(tasks)) if tasks else read_suite(suite)
    limit = limit if limit is not None else chosen.limit
    _check(models, limit, batch_size, compared)
    with quiet():
        opened = [open_model(name, trust_remote_code) for name in models]
        for each in opened:
            _check_beginning(each)
        tell("loading the tasks")
        manager = task_manager(chosen.benchmarks, include_path)
        loaded = load_tasks(manager, chosen.benchmarks, confirm_run_unsafe_code)
        report: dict[str, Any] = {
            "suite": _described(chosen),
            "limit": limit,
            "batch_size": batch_size,
            "versions": {name: version(name) for name in PACKAGES} | {"python": platform.python_version()},
            "models": [],
            "confidence": CONFIDENCE,
            "compared": [],
        }
        items: list[list[Items | None]] = []
        for each in opened:
            tell(f"scoring {each.name}")
            scores, found = _score(each, loaded, batch_size, limit)
            report["models"].append(scores)
            items.append(found)
            keep(report)  # before the comparison, whose failure must not lose the scores
            if compared and len(items) > 1:
                change = compare(report["models"][0]["scores"], items[0], found)
                report["compared"].append({"first": opened[0].name, "second": each.name, **change})
                keep(report)
    return report


def _check(models: Sequence[str], limit: int | None, batch_size: int | str, compared: bool) -> None:
    if compared and len(models) < 2:
        raise EvalError("a comparison needs two models or more")
    if limit is not None and limit < 1:
        raise EvalError(f"limit={limit} is not allowed: use a number of items from 1 up")
    if batch_size != "auto" and (isinstance(batch_size, str) or batch_size < 1):
        raise EvalError(f"batch_size={batch_size!r} is not allowed: use auto, or a number from 1 up")


def _check_beginning(opened: Opened) -> None:
    if opened.tokenizer.bos_token_id is None and opened.tokenizer.eos_token_id is None:
        raise EvalError(
            f"the tokenizer of {opened.name} has neither bos_token nor eos_token: a text must begin with one"
        )


def _described(suite: Suite) -> dict[str, Any]:
    return {"name": suite.name, "source": suite.source, "missing": list(suite.missing)}


def _score(
    opened: Opened, tasks: Sequence[Loaded], batch_size: int | str, limit: int | None
) -> tuple[dict[str, Any], list[Items | None]]:
    """One model's part of the report, and the items behind its rows; the model is gone afterwards."""
    model = load_model(opened)
    folder = Path(opened.name)
    fingerprint = model_fingerprint(folder) if folder.is_dir() else None
    outcome = run_harness(model, opened.tokenizer, tasks, batch_size, limit)
    rows = score_rows(tasks, outcome)
    report = {
        "model": opened.name,
        "fingerprint": fingerprint,
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
