"""Corrupted windows of text, from which a model learns: masked tokens, swapped segments, and spans that are cut out.

A window is changed by a function of its tokens and of draws, which `Prepared` makes from the seed and the number of
the sample: a resumed run sees the same samples.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from crosshead.common.errors import RecipeError

from ..schema.objectives import MaskedTokens, Spans
from .tokenising import check_vocabulary
from .training_data import NOT_PREDICTED, Sample

MASKED, REPLACED = 0.8, 0.1
"""The shares of predicted tokens that are masked, and replaced by any token; the others stay."""
IN_ORDER, SWAPPED = 0, 1
"""Labels of two segments, those of ALBERT."""
SENTINEL = "<extra_id_{}>"
"""The token instead of a span, by its number in the text."""

Tokens = np.ndarray[Any, np.dtype[np.int64]]


class Corruption(ABC):
    """Changes a window."""

    text_length: int
    """Tokens of a window before the change."""

    @abstractmethod
    def __call__(self, sample: Sample, draws: np.random.Generator) -> Sample:
        """The changed window."""


@dataclass(frozen=True)
class TokenMasking(Corruption):
    """BERT's masks in one segment, or in two as ALBERT."""

    text_length: int
    share: float
    ordered: bool
    mask: int
    begin: tuple[int, ...]
    """[CLS]."""
    end: tuple[int, ...]
    """[SEP], after each segment."""
    ordinary: Tokens
    """All tokens of the vocabulary but the special ones: those that are predicted, and replacements."""

    def __call__(self, sample: Sample, draws: np.random.Generator) -> Sample:
        """Inputs, labels and, with segments, the types of tokens and the label of the order."""
        text = sample["input_ids"].numpy()
        segments = [text]
        more: Sample = {}
        if self.ordered:
            segments, label = self._segments(text, draws)
            sizes = [len(self.begin) + len(segments[0]) + len(self.end), len(segments[1]) + len(self.end)]
            more["token_type_ids"] = torch.from_numpy(np.repeat(np.arange(2), sizes))
            more["order_labels"] = torch.tensor(label)
        parts = [part for each in segments for part in (each, self.end)]
        inputs, labels = self._masked(np.concatenate([self.begin, *parts]).astype(np.int64), draws)
        return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels), **more}

    def _segments(self, text: Tokens, draws: np.random.Generator) -> tuple[list[Tokens], int]:
        """Two consecutive segments, each at least a quarter of the window, not cut between documents if possible."""
        quarter = max(1, len(text) // 4)
        places = np.arange(quarter, len(text) - quarter + 1)
        inside = places[np.isin(text[places - 1], self.ordinary)]
        cut = draws.choice(inside if len(inside) else places)
        swapped = draws.random() < 0.5
        segments = [text[:cut], text[cut:]]
        return (segments[::-1], SWAPPED) if swapped else (segments, IN_ORDER)

    def _masked(self, tokens: Tokens, draws: np.random.Generator) -> tuple[Tokens, Tokens]:
        candidates = np.flatnonzero(np.isin(tokens, self.ordinary))
        if not len(candidates):  # such as a window of unknown tokens
            candidates = np.arange(len(self.begin), len(tokens) - len(self.end))
        count = max(1, round(self.share * len(candidates)))
        chosen = draws.choice(candidates, count, replace=False)
        labels = np.full_like(tokens, NOT_PREDICTED)
        labels[chosen] = tokens[chosen]
        kind, inputs = draws.random(count), tokens.copy()
        replacements = draws.choice(self.ordinary, count)
        inputs[chosen] = np.where(
            kind < MASKED, self.mask, np.where(kind < MASKED + REPLACED, replacements, tokens[chosen])
        )
        return inputs, labels


def masked_tokens(options: MaskedTokens, tokenizer: Any, vocabulary: int, length: int) -> TokenMasking:
    """The masks for inputs of a length, special tokens included."""
    if tokenizer.mask_token_id is None:
        raise RecipeError(
            "the tokenizer has no mask_token, which the objective masked_tokens needs: set one in its folder"
        )
    ordered = options.segments == "order"
    begin, end = ((token,) if token is not None else () for token in (tokenizer.cls_token_id, tokenizer.sep_token_id))
    text_length = length - len(begin) - len(end) * (1 + ordered)
    if text_length < 2:
        raise RecipeError(f"data.length={length} leaves no text beside special tokens: raise it")
    check_vocabulary([tokenizer.mask_token_id, *begin, *end], vocabulary)
    special = set(tokenizer.all_special_ids)
    ordinary = np.array([token for token in sorted(tokenizer.get_vocab().values()) if token not in special], np.int64)
    return TokenMasking(
        text_length=text_length,
        share=options.share,
        ordered=ordered,
        mask=tokenizer.mask_token_id,
        begin=begin,
        end=end,
        ordinary=ordinary[ordinary < vocabulary],
    )


@dataclass(frozen=True)
class SpanCorruption(Corruption):
    """T5's: the text is divided into pieces, of which every second is replaced by a sentinel."""

    text_length: int
    noise: int
    """Tokens that are cut out."""
    sentinels: tuple[int, ...]
    """One for each span."""
    end: int
    """The token after inputs and labels."""
    start: int
    """The decoder's first input."""

    def __call__(self, sample: Sample, draws: np.random.Generator) -> Sample:
        """The encoder's inputs, the labels, and these as the decoder's inputs, one place later."""
        text = sample["input_ids"].numpy()
        kept = random_sizes(len(text) - self.noise, len(self.sentinels), draws)
        cut = random_sizes(self.noise, len(self.sentinels), draws)
        bounds = np.cumsum(np.stack([kept, cut], axis=1).reshape(-1))
        pieces = np.split(text, bounds[:-1])
        inputs, labels = list[Any](), list[Any]()
        for sentinel, plain, span in zip(self.sentinels, pieces[::2], pieces[1::2], strict=True):
            inputs += [plain, [sentinel]]
            labels += [[sentinel], span]
        target = np.concatenate([*labels, [self.end]]).astype(np.int64)
        return {
            "input_ids": torch.from_numpy(np.concatenate([*inputs, [self.end]]).astype(np.int64)),
            "decoder_input_ids": torch.from_numpy(np.concatenate([[self.start], target[:-1]])),
            "labels": torch.from_numpy(target),
        }


def random_sizes(total: int, count: int, draws: np.random.Generator) -> Tokens:
    """The sizes of `count` pieces of at least one, all divisions of `total` equally likely."""
    cuts = np.sort(draws.choice(total - 1, count - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=total)


def span_sizes(options: Spans, length: int) -> tuple[int, int, int]:
    """Tokens of the text, tokens cut out, and spans, for inputs of at most a length with sentinels and the end."""

    def sizes(text: int) -> tuple[int, int]:
        noise = min(max(1, round(text * options.share)), text - 1)
        return noise, min(max(1, round(noise / options.mean_length)), noise, text - noise)

    text = 2
    while (text + 1) - sizes(text + 1)[0] + sizes(text + 1)[1] + 1 <= length:
        text += 1
    return text, *sizes(text)


def cut_spans(options: Spans, tokenizer: Any, vocabulary: int, length: int, start: int) -> SpanCorruption:
    """The corruption for an encoder that reads inputs of a length."""
    if length < 4:
        raise RecipeError(f"data.length={length} is too short for a span, its sentinel and the end: raise it")
    text, noise, spans = span_sizes(options, length)
    tokens = tokenizer.get_vocab()
    missing = [name for name in map(SENTINEL.format, range(spans)) if name not in tokens]
    if missing:
        raise RecipeError(
            f"the tokenizer has no {missing[0]}, and inputs of data.length={length} need {spans} such tokens: use a "
            "T5 tokenizer, a shorter length or a higher mean_length"
        )
    sentinels = tuple(tokens[SENTINEL.format(number)] for number in range(spans))
    check_vocabulary([*sentinels, start], vocabulary)
    return SpanCorruption(text, noise, sentinels, tokenizer.eos_token_id, start)
