"""Scores models on the tasks of lm-evaluation-harness, and compares them item by item."""

import gc
import platform
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from crosshead.common.errors import EvalError
from crosshead.common.fingerprint import model_fingerprint

from ..open_model import Opened, load_model, open_model, parameter_count
from .lm_eval_model import hf_model, quiet, run_harness, vllm_model
from .scores import CONFIDENCE, Items, average, compare, score_rows
from .tasks import LoadedBenchmark, load_tasks, read_suite, suite_of_tasks

BACKENDS = ("hf", "vllm")
"""Libraries that run a model: transformers, or vLLM, which must be installed in the same environment."""
Scored = tuple[dict[str, Any], list[Items | None]]
"""The report of one model, and the items behind each of its scores."""


def evaluate(
    models: Sequence[str],
    suite: str = "quick",
    *,
    tasks: Sequence[str] = (),
    include_path: Path | None = None,
    limit: int | None = None,
    batch_size: int | str = "auto",
    backend: str = "hf",
    compared: bool = False,
    trust_remote_code: bool = False,
    confirm_run_unsafe_code: bool = False,
    progress: Callable[[str], None] = lambda message: None,
    save: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """Score each model on a suite, or on `tasks`; with `compared`, compare each later model with the first.

    `limit` is the maximum number of items of each task, counted from the first; `backend` is one of `BACKENDS`. The
    returned report can be written as JSON. `save` is called with the report so far after each model and each
    comparison, so that a later failure loses no scores.
    """
    chosen = suite_of_tasks(tasks) if tasks else read_suite(suite)
    limit = limit if limit is not None else chosen.limit
    check_options(models, limit, batch_size, compared)
    if backend not in BACKENDS:
        raise EvalError(f"backend={backend!r} is not allowed: use {' or '.join(BACKENDS)}")
    with quiet():
        opened = [open_model(name, trust_remote_code) for name in models]
        for model in opened:
            _check_special_tokens(model)
        parameters = [parameter_count(model) for model in opened]  # before vLLM patches classes of transformers
        progress("loading the tasks")
        benchmarks = load_tasks(chosen.benchmarks, include_path, confirm_run_unsafe_code)
        report = {
            "suite": {"name": chosen.name, "source": chosen.source, "missing": list(chosen.missing)},
            "limit": limit,
            "batch_size": batch_size,
            "backend": backend,
            "versions": versions("lm_eval"),
        }
        runs = [partial(_score, model, benchmarks, batch_size, limit, backend) for model in opened]
        return score_all(report, opened, parameters, runs, compared, progress, save)


def versions(*others: str) -> dict[str, str]:
    """Return the versions of the packages on which scores depend, with `others` among them, and of Python."""
    packages = ("crosshead", *others, "transformers", "torch")
    return {name: version(name) for name in packages} | {"python": platform.python_version()}


def score_all(
    report: dict[str, Any],
    opened: Sequence[Opened],
    parameters: Sequence[int],
    runs: Sequence[Callable[[], Scored]],
    compared: bool,
    progress: Callable[[str], None],
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Add to `report` the scores of each model and, if `compared`, its changes from the first; `save` after each.

    `parameters` are the numbers of parameters of the models, and `runs` score them.
    """
    scored, comparisons = list[dict[str, Any]](), list[dict[str, Any]]()
    report |= {"models": scored, "confidence": CONFIDENCE, "compared": comparisons}
    for model, count, run in zip(opened, parameters, runs, strict=True):
        progress(f"scoring {model.name}")
        scores, items = run()
        scored.append(scores | {"parameters": count})
        save(report)  # before the comparison, which may fail
        if len(scored) == 1:
            first = items
        elif compared:
            changes = compare(scored[0]["scores"], first, items)
            comparisons.append({"first": scored[0]["model"], "second": scores["model"], **changes})
            save(report)
    return report


def model_fields(opened: Opened, dtype: Any, device: Any) -> dict[str, Any]:
    """Return the fields of a report that describe the model."""
    folder = Path(opened.name)
    return {
        "model": opened.name,
        "fingerprint": model_fingerprint(folder) if folder.is_dir() else None,
        "model_type": opened.config.model_type,
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
    }


def check_options(models: Sequence[str], limit: int | None, batch_size: int | str, compared: bool) -> None:
    """Raise `EvalError` for options that make no sense."""
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
    opened: Opened, benchmarks: Sequence[LoadedBenchmark], batch_size: int | str, limit: int | None, backend: str
) -> Scored:
    """Score one model, which is unloaded afterwards."""
    if backend == "vllm":
        checked = vllm_model(opened, batch_size)
        settings = checked.model.llm_engine.vllm_config
        dtype, device = settings.model_config.dtype, settings.device_config.device_type
    else:
        model = load_model(opened)
        checked, dtype, device = hf_model(model, opened.tokenizer, batch_size), model.dtype, model.device
        del model
    results = run_harness(checked, benchmarks, limit)
    if backend == "vllm":
        checked.model.llm_engine.engine_core.shutdown()  # its process and memory, before the next model
    rows = score_rows(benchmarks, results)
    scores = [row for row, _ in rows]
    report = {
        **model_fields(opened, dtype, device),
        "context": results["context"],
        "scores": scores,
        "average": average(scores) if all(loaded.benchmark.metric for loaded in benchmarks) else None,
        "task_versions": {name: str(number) for name, number in results["versions"].items()},
    }
    del checked
    gc.collect()  # the harness keeps the model in reference cycles
    return report, [items for _, items in rows]
