"""Scores models on a user's data. The class that a model's config names determines the kind of data and scores."""

import gc
import math
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from crosshead.common.errors import EvalError
from crosshead.common.fingerprint import files_digest

from ..harness.evaluate import Scored, check_options, model_fields, score_all, versions
from ..harness.lm_eval_model import quiet
from ..harness.scores import Row
from ..open_model import Opened, load_model, open_config, parameter_count, with_tokenizer
from .data import Data
from .images import LabelledImages
from .metrics import Score
from .sequences import LabelledRows
from .windows import CorruptedWindows, MaskedWindows, Windows

KINDS: dict[str, type[Data]] = {
    "ForSequenceClassification": LabelledRows,
    "ForMaskedLM": MaskedWindows,
    "BertForPreTraining": MaskedWindows,
    "AlbertForPreTraining": MaskedWindows,
    "T5ForConditionalGeneration": CorruptedWindows,
    "ForImageClassification": LabelledImages,
    "ForImageClassificationWithTeacher": LabelledImages,
}
"""Ending of a model class's name -> the kind of data on which it is scored."""


def score_data(
    models: Sequence[str],
    path: Path,
    *,
    limit: int | None = None,
    batch_size: int | str = "auto",
    compared: bool = False,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] = lambda message: None,
    save: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """Score each model on a file or a folder; with `compared`, compare each later model with the first.

    The report has the fields of `harness.evaluate`, and the name and the digest of the data. `save` is called with the
    report so far after each model and each comparison.
    """
    check_options(models, limit, batch_size, compared)
    if not path.exists():
        raise EvalError(f"--data {path}: there is no such file or folder")
    with quiet():
        data = _open(models, path, limit, trust_remote_code)
        for other in data if compared else ():
            if other.tokens != data[0].tokens:
                raise EvalError(
                    f"{data[0].opened.name} and {other.opened.name} have different tokens for this text: leave out "
                    "--compare"
                )
        parameters = [parameter_count(model_data.opened, model_data.auto_class) for model_data in data]
        name = path.resolve().name
        report = {
            "suite": {"name": data[0].title, "source": name, "missing": []},
            "data": {"name": name, "sha256": files_digest(data[0].files)},
            "limit": limit,
            "batch_size": batch_size,
            "backend": "hf",
            "versions": versions(),
        }
        opened = [model_data.opened for model_data in data]
        runs = [partial(_score, model_data, name, batch_size) for model_data in data]
        return score_all(report, opened, parameters, runs, compared, progress, save)


def _open(models: Sequence[str], path: Path, limit: int | None, trust_remote_code: bool) -> list[Data]:
    """Return the data as each model reads it; all models must be of one kind."""
    opened = [open_config(name, trust_remote_code) for name in models]
    kinds = [_kind(model) for model in opened]
    for model, kind in zip(opened, kinds, strict=True):
        if kind is not kinds[0]:
            raise EvalError(
                f"{opened[0].name} is a model for {kinds[0].title}, and {model.name} for {kind.title}: "
                "score them separately"
            )
    if kinds[0] is not LabelledImages:
        opened = [with_tokenizer(model) for model in opened]
    contexts = [_context(model) for model in opened]
    if issubclass(kinds[0], Windows):  # all models must have the same windows
        contexts = [min(contexts)] * len(contexts)
    return [kinds[0](model, path, limit, context) for model, context in zip(opened, contexts, strict=True)]


def _kind(opened: Opened) -> type[Data]:
    classes = opened.config.architectures or ["model without `architectures` in its config.json"]
    kind = next((kind for ending, kind in KINDS.items() if classes[0].endswith(ending)), None)
    if kind is None:
        raise EvalError(
            f"{opened.name} is a {classes[0]}, which --data does not score: it scores *{', *'.join(KINDS)}; for a "
            "causal language model use --suite or --tasks"
        )
    return kind


def _context(opened: Opened) -> int:
    """Return the maximum number of tokens of model and tokenizer; `sys.maxsize` if neither has a limit."""
    limits = (
        getattr(opened.config.get_text_config(), "max_position_embeddings", None),
        getattr(opened.tokenizer, "model_max_length", None),  # a very large number if it has none
    )
    return min(int(limit) for limit in (*limits, sys.maxsize) if limit is not None)


def _score(data: Data, name: str, batch_size: int | str) -> Scored:
    """Score one model, which is unloaded afterwards."""
    model = load_model(data.opened, data.auto_class)
    scores = data.run(model, batch_size)
    report = {
        **model_fields(data.opened, model.dtype, model.device),
        "context": data.context,
        "scores": [_row(data, name, score) for score in scores],
        "average": None,
        "task_versions": {},
    }
    del model
    gc.collect()
    return report, [score.items for score in scores]


def _row(data: Data, name: str, score: Score) -> Row:
    try:
        value, error = score.value, score.items.standard_error()
    except OverflowError as overflow:
        raise EvalError("a perplexity is too large to be a number: the model's weights are broken") from overflow
    return {
        "name": name,
        "task": re.sub(r"[^\w.-]+", "_", name, flags=re.ASCII).lstrip(".") or "data",  # the Hub allows few characters
        "metric": score.metric,
        "filter": "none",
        "shots": None,
        "score": value,
        "standard_error": None if math.isnan(error) else error,
        "items": len(score.items.values),
        "items_cut": data.cut,
        "higher_is_better": score.higher_is_better,
    }
