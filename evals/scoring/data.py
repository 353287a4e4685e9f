"""Base class of the four kinds of evaluation data: it runs the items in batches and scores the results."""

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
    """The items of a user's data, as one model reads them."""

    auto_class: ClassVar[Any]
    """The Auto class of transformers that loads the model."""
    title: ClassVar[str]
    """The task of the model."""
    reads_text: ClassVar[bool] = True
    opened: Opened
    """The model, with its tokenizer if it reads text."""
    files: Sequence[Path]
    """The files with the data."""
    lengths: list[int]
    """The size of each item, by which batches are made: tokens, or 1 for an image."""
    context: int | None = None
    """The tokens of the longest item that the model reads."""
    cut: int = 0
    """Items that are longer, whose end is removed."""
    largest_batch: int | None = None

    @abstractmethod
    def __init__(self, opened: Opened, path: Path, limit: int | None, context: int) -> None:
        """Read at most `limit` items, each with at most `context` tokens."""

    @abstractmethod
    def outcomes(self, model: Any, indices: Sequence[int]) -> Tensor:
        """The results of the model for some items: (B, numbers of this kind), float64, on the CPU."""

    @abstractmethod
    def scores(self, outcomes: Tensor) -> list[Score]:
        """The scores of the outcomes of all items."""

    def comparable(self) -> Any:
        """Data that must be equal for two models whose items are compared."""
        return None

    def run(self, model: Any, batch_size: int | str) -> list[Score]:
        """Run the model on all items."""
        order, outcomes = list[int](), list[Tensor]()
        for indices in self._batches(batch_size, model.device.type == "cpu"):
            try:
                with torch.inference_mode():
                    found = self.outcomes(model, indices)
            except RuntimeError as error:  # memory, and sizes that do not fit
                raise EvalError(
                    f"{self.opened.label} cannot run on a batch of {len(indices)}: {one_line(error)}"
                ) from error
            if not found.isfinite().all():
                raise EvalError(f"{self.opened.label} gives nan or inf on this data: its weights are broken")
            order += indices
            outcomes.append(found)
        return self.scores(torch.cat(outcomes)[torch.tensor(order).argsort()])

    def _batches(self, batch_size: int | str, on_cpu: bool) -> Iterator[Sequence[int]]:
        """Indices of items of similar length, the longest first."""
        order = sorted(range(len(self.lengths)), key=lambda index: -self.lengths[index])
        while order:
            size = int(batch_size) if batch_size != "auto" else MAXIMUM_BATCH
            if batch_size == "auto" and on_cpu:
                size = max(1, min(size, TOKENS_ON_CPU // self.lengths[order[0]]))
            size = min(size, self.largest_batch or size)
            yield order[:size]
            order = order[size:]


def padded(rows: Iterable[Sequence[int]], value: int) -> Tensor:
    """Rows of numbers (B, T), filled up at the end."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)


def text_inputs(rows: Sequence[Mapping[str, Sequence[int]]], padding: int, model: Any) -> dict[str, Tensor]:
    """The inputs of a model for encoded texts, on its device."""
    values = {"input_ids": padding}
    return {name: padded((row[name] for row in rows), values.get(name, 0)).to(model.device) for name in rows[0]}


def label_outcomes(logits: Tensor, labels: Sequence[int], top: int) -> Tensor:
    """Loss, prediction, and 1 where the label is among the `top` likeliest classes, of each item."""
    logits, targets = logits.cpu().double(), torch.tensor(labels)
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    likeliest = logits.topk(min(top, logits.shape[-1])).indices
    among = (likeliest == targets[:, None]).any(-1)
    return torch.stack([losses, likeliest[:, 0].double(), among.double()], dim=1)


def token_outcomes(logits: Tensor, targets: Tensor, rows: Tensor, count: int) -> Tensor:
    """Sums of losses, hits and tokens of each of `count` windows; `rows` has the window of each token."""
    losses = torch.nn.functional.cross_entropy(logits.float(), targets.to(logits.device), reduction="none")
    hits = logits.argmax(-1).cpu() == targets
    found = torch.stack([losses.cpu().double(), hits.double(), torch.ones(len(hits)).double()], dim=1)
    return found.new_zeros(count, 3).index_add(0, rows, found)
