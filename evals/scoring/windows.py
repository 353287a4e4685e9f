"""Scores masked language models and T5 on plain text, with the same masks or spans for all models of a tokenizer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor
from transformers import AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from crosshead.common.errors import EvalError
from crosshead.common.plain_text import end_tokens, read_text, start_tokens
from crosshead.common.span_corruption import corrupted
from crosshead.modeling.model import IGNORED_LABEL

from ..open_model import Opened, check_tokens
from .data import Data, padded, text_inputs, token_outcomes
from .files import text_files
from .metrics import Score, token_scores

SEED = 0
RATE, SPAN = 0.15, 3
"""Fraction of the tokens that a model has to predict, and mean length of a span of T5 in tokens."""
LENGTH = 512
"""Length of a window in tokens, if the model's context is long enough."""


class Windows(Data):
    """Windows of a text that do not overlap, and never reach from one file into the next."""

    tokens: list[list[int]]
    """Token ids of each window, without special tokens, which determine the masks and spans."""

    def read(self, opened: Opened, path: Path, limit: int | None, length: int) -> None:
        """Cut the text into windows of `length` tokens."""
        if length < 2:
            raise EvalError(
                f"{opened.label} reads {max(length, 0)} tokens besides the special ones, and a window needs 2 or more"
            )
        self.opened, self.tokens, self.files = opened, [], text_files(path)
        for file in self.files:
            ids = opened.tokenizer(read_text(file, EvalError), add_special_tokens=False, verbose=False)["input_ids"]
            check_tokens(ids, opened.config.vocab_size)
            windows = [ids[start : start + length] for start in range(0, len(ids), length)]
            self.tokens += [window for window in windows if len(window) > 1]
        if not self.tokens:
            raise EvalError(f"{path} is too short: a window needs 2 tokens or more")
        self.tokens = self.tokens[:limit]

    def scores(self, outcomes: Tensor) -> list[Score]:
        """Return loss, perplexity and accuracy."""
        return token_scores(*outcomes.unbind(1))


class MaskedWindows(Windows):
    """Windows in which the mask token replaces random tokens."""

    auto_class = AutoModelForMaskedLM
    title = "masked language modelling"

    def __init__(self, opened: Opened, path: Path, limit: int | None, context: int) -> None:
        """Mask random tokens of each window; the tokenizer's start and end tokens are around a window."""
        start, end = start_tokens(opened.tokenizer), end_tokens(opened.tokenizer)
        self.context = min(context, LENGTH)
        self.read(opened, path, limit, self.context - len(start) - len(end))
        mask = opened.tokenizer.mask_token_id
        if mask is None:
            raise EvalError(f"the tokenizer of {opened.label} has no mask_token: set one in its tokenizer_config.json")
        check_tokens([mask, *start, *end], opened.config.vocab_size)
        generator = Generator().manual_seed(SEED)
        self.masked_positions, self.encoded = [], []
        for window in self.tokens:
            count = max(1, round(RATE * len(window)))
            chosen = torch.randperm(len(window), generator=generator)[:count].sort().values
            ids = torch.tensor([*start, *window, *end])
            ids[chosen + len(start)] = mask
            self.masked_positions.append((chosen + len(start), torch.tensor(window)[chosen]))
            self.encoded.append({"input_ids": ids.tolist(), "attention_mask": [1] * len(ids)})
        self.lengths = [len(encoded["input_ids"]) for encoded in self.encoded]

    def outcomes(self, model: Any, indices: Sequence[int]) -> Tensor:
        """Return sums over the masked tokens of each window (B, 3): loss, hits and number of tokens."""
        positions, targets = zip(*(self.masked_positions[index] for index in indices), strict=True)
        counts = torch.tensor([len(masked) for masked in positions])
        rows = torch.arange(len(indices)).repeat_interleave(counts)
        inputs = text_inputs([self.encoded[index] for index in indices], self.opened.config.pad_token_id or 0, model)
        logits = model(**inputs).logits[rows, torch.cat(positions)]
        return token_outcomes(logits, torch.cat(targets), rows, len(indices))


class CorruptedWindows(Windows):
    """Windows in which sentinels replace spans; T5 must write each span after its sentinel."""

    auto_class = AutoModelForSeq2SeqLM
    title = "span corruption"

    def __init__(self, opened: Opened, path: Path, limit: int | None, context: int) -> None:
        """Corrupt spans as in T5's training: spans are never adjacent, and the last one ends the window."""
        self.context = min(context, LENGTH)
        self.read(opened, path, limit, self.context)
        generator = Generator().manual_seed(SEED)
        self.inputs, self.answers = list[list[int]](), list[list[int]]()
        for window in self.tokens:
            spans = noise_spans(len(window), generator)
            sentinels = [_token(opened, f"<extra_id_{index}>") for index in range(len(spans))]
            inputs, answer = corrupted(window, spans, sentinels, _token(opened, opened.tokenizer.eos_token))
            self.inputs.append(inputs)
            self.answers.append(answer)
        self.lengths = [len(inputs) for inputs in self.inputs]

    def outcomes(self, model: Any, indices: Sequence[int]) -> Tensor:
        """Return sums (B, 3) over the tokens of each answer, with sentinels and the end token, as in training."""
        encoded = [{"input_ids": self.inputs[index], "attention_mask": [1] * self.lengths[index]} for index in indices]
        labels = padded([self.answers[index] for index in indices], IGNORED_LABEL)
        inputs = text_inputs(encoded, self.opened.config.pad_token_id or 0, model)
        logits = model(**inputs, labels=labels.to(model.device)).logits
        rows, positions = (labels != IGNORED_LABEL).nonzero(as_tuple=True)
        return token_outcomes(logits[rows, positions], labels[rows, positions], rows, len(indices))


def _token(opened: Opened, word: str | None) -> int:
    """Return the id of a special token, which tokenizer and model must have."""
    tokenizer = opened.tokenizer
    token = None if word is None else tokenizer.convert_tokens_to_ids(word)
    if token is None or (token == tokenizer.unk_token_id and word != tokenizer.unk_token):
        raise EvalError(
            f"the tokenizer of {opened.label} has no token {word or 'eos_token'}, which span corruption needs"
        )
    check_tokens([token], opened.config.vocab_size)
    return int(token)


def noise_spans(length: int, generator: Generator) -> list[tuple[int, int]]:
    """Return begin and end of the random spans of a window: `RATE` of its tokens, in spans of `SPAN` on average."""
    noise = min(max(1, round(RATE * length)), length - 1)
    count = max(1, round(noise / SPAN))
    spans, position = [], 0
    for plain, noisy in zip(_parts(length - noise, count, generator), _parts(noise, count, generator), strict=True):
        spans.append((position + plain, position + plain + noisy))
        position += plain + noisy
    return spans


def _parts(total: int, count: int, generator: Generator) -> list[int]:
    """Return `count` random positive numbers with the sum `total`; every choice is equally likely."""
    inner = torch.randperm(total - 1, generator=generator)[: count - 1].sort().values + 1
    return torch.diff(inner, prepend=torch.tensor([0]), append=torch.tensor([total])).tolist()
