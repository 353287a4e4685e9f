"""Scores sequence classifiers, and regressions of one value, on rows of texts as in GLUE."""

import inspect
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from crosshead.common.errors import EvalError

from ..open_model import Opened, check_tokens
from .data import Data, label_outcomes, text_inputs
from .files import class_of, read_rows
from .metrics import Score, class_scores, value_scores

MIN_ROWS = 3
"""Minimum number of rows for a correlation with a standard error."""


def _end_with(token: int, encoded: dict[str, list[int]], context: int) -> None:
    """End a text with `token`: a classifier such as T5's reads its output, but some tokenizers do not add it."""
    if encoded["input_ids"][-1:] != [token]:
        encoded["input_ids"] = [*encoded["input_ids"][: context - 1], token]
        encoded["attention_mask"] = [1] * len(encoded["input_ids"])


class LabelledRows(Data):
    """Texts or pairs of texts, each with a class or a value."""

    auto_class = AutoModelForSequenceClassification
    title = "sequence classification"

    def __init__(self, opened: Opened, path: Path, limit: int | None, context: int) -> None:
        """Encode the rows; a row that is too long is truncated."""
        config = opened.config
        if config.problem_type == "multi_label_classification":
            raise EvalError(f"{opened.label} gives several labels to one text (problem_type), which is not supported")
        self.opened, self.context, self.files = opened, context, [path]
        rows, tokenizer = read_rows(path, limit), opened.tokenizer
        self.regression = config.num_labels == 1
        self.labels = [
            _value(label, where) if self.regression else class_of(config, label, where) for where, _, label in rows
        ]
        if self.regression and (len(rows) < MIN_ROWS or len(set(self.labels)) == 1):
            raise EvalError(f"{path}: a correlation needs {MIN_ROWS} rows or more with different labels")
        self.encoded = [dict(tokenizer(*texts, verbose=False)) for _, texts, _ in rows]
        for index, (_, texts, _) in enumerate(rows):
            if len(self.encoded[index]["input_ids"]) > context:
                self.cut += 1
                self.encoded[index] = dict(tokenizer(*texts, truncation=True, max_length=context))
            if config.is_encoder_decoder:
                _end_with(config.eos_token_id, self.encoded[index], context)
            check_tokens(self.encoded[index]["input_ids"], config.get_text_config().vocab_size)
        self.lengths = [len(encoded["input_ids"]) for encoded in self.encoded]
        self.padding = config.get_text_config().pad_token_id
        if self.padding is None:  # a decoder could not find the last token in a padded batch
            self.largest_batch = 1

    def outcomes(self, model: Any, indices: Sequence[int]) -> Tensor:
        """Return predicted values (B, 1), or loss, predicted class and hit (B, 3)."""
        read = inspect.signature(model.forward).parameters
        rows = [{name: ids for name, ids in self.encoded[index].items() if name in read} for index in indices]
        logits: Tensor = model(**text_inputs(rows, self.padding or 0, model)).logits
        if self.regression:
            return logits.cpu().double()
        return label_outcomes(logits, [int(self.labels[index]) for index in indices], 1)

    def scores(self, outcomes: Tensor) -> list[Score]:
        """Return correlations, or accuracy, F1, Matthews correlation and loss."""
        if self.regression:
            return value_scores(outcomes[:, 0], torch.tensor(self.labels, dtype=torch.float64))
        return class_scores(
            outcomes[:, 0], outcomes[:, 1].long(), torch.tensor(self.labels), self.opened.config.num_labels
        )


def _value(label: Any, where: str) -> float:
    try:
        value = math.nan if isinstance(label, bool) else float(label)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise EvalError(f"{where}: the label {str(label)[:60]!r} is not a number, as this model's num_labels=1 needs")
    return value
