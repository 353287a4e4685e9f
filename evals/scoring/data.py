"""Base class of the four kinds of evaluation data, which runs the items in batches and scores the results."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from crosshead.common.errors import EvalError, one_line

from ..harness.lm_eval_model import MAXIMUM_BATCH, TOKENS_ON_CPU
from ..open_model import Opened
from .metrics import Score


class Data(ABC):
    """The items of a user's data, encoded for one model."""

    auto_class: ClassVar[Any]
    """The Auto class of transformers that loads the model."""
    title: ClassVar[str]
    """Name of the task in reports and messages, such as "image classification"."""
    opened: Opened
    """The model, with its tokenizer if it reads text."""
    files: Sequence[Path]
    """The files with the data."""
    lengths: list[int]
    """Size of each item, by which items are batched: number of tokens, or 1 for an image."""
    context: int | None = None
    """Maximum number of tokens of an item; None for images."""
    cut: int = 0
    """Number of items with more tokens than `context`, whose end is removed."""
    largest_batch: int | None = None
    """Maximum number of items in a batch; None means no maximum."""
    tokens: list[list[int]] | None = None
    """Token ids that must be equal for two models whose items are compared; None for data that any models share."""

    @abstractmethod
    def __init__(self, opened: Opened, path: Path, limit: int | None, context: int) -> None:
        """Read at most `limit` items, each with at most `context` tokens."""

    @abstractmethod
    def outcomes(self, model: Any, indices: Sequence[int]) -> Tensor:
        """Return the model's results for some items: (B, numbers of this kind of data), float64, on the CPU."""

    @abstractmethod
    def scores(self, outcomes: Tensor) -> list[Score]:
        """Return the scores from the outcomes of all items."""

    def run(self, model: Any, batch_size: int | str) -> list[Score]:
        """Run the model on all items and return the scores."""
        order, outcomes = list[int](), list[Tensor]()
        for indices in self._batches(batch_size, model.device.type == "cpu"):
            try:
                with torch.inference_mode():
                    results = self.outcomes(model, indices)
            except RuntimeError as error:  # memory, and sizes that do not fit
                raise EvalError(
                    f"{self.opened.label} cannot run on a batch of {len(indices)}: {one_line(error)}"
                ) from error
            if not results.isfinite().all():
                raise EvalError(f"{self.opened.label} gives nan or inf on this data: its weights are broken")
            order += indices
            outcomes.append(results)
        return self.scores(torch.cat(outcomes)[torch.tensor(order).argsort()])

    def _batches(self, batch_size: int | str, on_cpu: bool) -> Iterator[Sequence[int]]:
        """Yield batches of indices of items of similar length, the longest first."""
        order = sorted(range(len(self.lengths)), key=lambda index: -self.lengths[index])
        while order:
            size = int(batch_size) if batch_size != "auto" else MAXIMUM_BATCH
            if batch_size == "auto" and on_cpu:
                size = max(1, min(size, TOKENS_ON_CPU // self.lengths[order[0]]))
            size = min(size, self.largest_batch or size)
            yield order[:size]
            order = order[size:]


def padded(rows: Iterable[Sequence[int]], value: int) -> Tensor:
    """Return rows of numbers as a tensor (B, T), padded at the end with `value`."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)


def text_inputs(rows: Sequence[Mapping[str, Sequence[int]]], padding: int, model: Any) -> dict[str, Tensor]:
    """Return the model's inputs for encoded texts, padded and on its device."""
    values = {"input_ids": padding}
    return {name: padded((row[name] for row in rows), values.get(name, 0)).to(model.device) for name in rows[0]}


def label_outcomes(logits: Tensor, labels: Sequence[int], top: int) -> Tensor:
    """Return loss, predicted class, and 1 if the label is among the `top` likeliest classes, of each item (B, 3)."""
    logits, targets = logits.cpu().double(), torch.tensor(labels)
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    likeliest = logits.topk(min(top, logits.shape[-1])).indices
    among = (likeliest == targets[:, None]).any(-1)
    return torch.stack([losses, likeliest[:, 0].double(), among.double()], dim=1)


def token_outcomes(logits: Tensor, targets: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return the sums of losses, hits and tokens per window (count, 3); `rows` has the window of each token."""
    losses = torch.nn.functional.cross_entropy(logits.float(), targets.to(logits.device), reduction="none")
    hits = logits.argmax(-1).cpu() == targets
    values = torch.stack([losses.cpu().double(), hits.double(), torch.ones(len(hits)).double()], dim=1)
    return values.new_zeros(count, 3).index_add(0, rows, values)
