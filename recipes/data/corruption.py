"""Corrupted text windows for denoising objectives: masked tokens, swapped segments, and spans that are cut out.

Corruption is a function of a window's tokens and a random generator, which `Prepared` derives from the seed and the
sample index: a resumed run sees the same samples.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from crosshead.common.errors import RecipeError
from crosshead.common.span_corruption import corrupted
from crosshead.modeling.model import IGNORED_LABEL

from ..schema.objectives import MaskedTokens, Spans
from .tokenising import check_vocabulary
from .training_data import Sample

MASKED, REPLACED = 0.8, 0.1
"""Fractions of the predicted tokens that are masked, and replaced by a random token; the others are unchanged."""
IN_ORDER, SWAPPED = 0, 1
"""Labels of the order of two segments, as in ALBERT."""
SENTINEL = "<extra_id_{}>"
"""Sentinel token that replaces a span, by the span's index in the text."""

Tokens = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class TokenMasking:
    """Masked tokens as in BERT, in one segment, or as in ALBERT in two segments whose order is predicted."""

    text_length: int
    """Number of tokens in a window before the corruption."""
    share: float
    """Fraction of the ordinary tokens that are predicted."""
    ordered: bool
    """Whether a window has two segments, possibly swapped."""
    mask: int
    """Id of the mask token."""
    begin: tuple[int, ...]
    """Id of [CLS]; empty if the tokenizer has none."""
    end: tuple[int, ...]
    """Id of [SEP], which follows each segment; empty if the tokenizer has none."""
    ordinary: Tokens
    """Sorted ids of the vocabulary without special tokens: candidates for prediction and for replacement."""

    def __call__(self, sample: Sample, draws: np.random.Generator) -> Sample:
        """Return `input_ids` and `labels` and, with two segments, `token_type_ids` and `order_labels`."""
        text = sample["input_ids"].numpy()
        segments = [text]
        segment_fields: Sample = {}
        if self.ordered:
            segments, label = self._segments(text, draws)
            sizes = [len(self.begin) + len(segments[0]) + len(self.end), len(segments[1]) + len(self.end)]
            segment_fields["token_type_ids"] = torch.from_numpy(np.repeat(np.arange(2), sizes))
            segment_fields["order_labels"] = torch.tensor(label)
        parts = [part for segment in segments for part in (segment, self.end)]
        inputs, labels = self._masked(np.concatenate([self.begin, *parts]).astype(np.int64), draws)
        return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels), **segment_fields}

    def _segments(self, text: Tokens, draws: np.random.Generator) -> tuple[list[Tokens], int]:
        """Split a window into two segments, swapped in half of the cases; return them and the label of their order.

        Each segment has at least a quarter of the window. The cut avoids document boundaries if possible.
        """
        quarter = max(1, len(text) // 4)
        positions = np.arange(quarter, len(text) - quarter + 1)
        inside = positions[np.isin(text[positions - 1], self.ordinary)]
        cut = draws.choice(inside if len(inside) else positions)
        swapped = draws.random() < 0.5
        segments = [text[:cut], text[cut:]]
        return (segments[::-1], SWAPPED) if swapped else (segments, IN_ORDER)

    def _masked(self, tokens: Tokens, draws: np.random.Generator) -> tuple[Tokens, Tokens]:
        candidates = np.flatnonzero(np.isin(tokens, self.ordinary))
        if not len(candidates):  # for example, a window of unknown tokens only
            candidates = np.arange(len(self.begin), len(tokens) - len(self.end))
        count = max(1, round(self.share * len(candidates)))
        chosen = draws.choice(candidates, count, replace=False)
        labels = np.full_like(tokens, IGNORED_LABEL)
        labels[chosen] = tokens[chosen]
        kind, inputs = draws.random(count), tokens.copy()
        replacements = draws.choice(self.ordinary, count)
        inputs[chosen] = np.where(
            kind < MASKED, self.mask, np.where(kind < MASKED + REPLACED, replacements, tokens[chosen])
        )
        return inputs, labels


def masked_tokens(options: MaskedTokens, tokenizer: Any, vocabulary: int, length: int) -> TokenMasking:
    """Return the masking for model inputs of `length` tokens, special tokens included."""
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
class SpanCorruption:
    """Span corruption as in T5: the text is divided into pieces, and a sentinel replaces every second piece."""

    text_length: int
    """Number of tokens in a window before the corruption."""
    noise: int
    """Number of tokens that are cut out."""
    sentinels: tuple[int, ...]
    """Sentinel token ids, one per span."""
    end: int
    """Id of the end token, appended to inputs and labels."""
    start: int
    """Id of the decoder's start token."""

    def __call__(self, sample: Sample, draws: np.random.Generator) -> Sample:
        """Return the encoder's `input_ids`, the `labels`, and `decoder_input_ids`: the labels shifted right by one."""
        text = sample["input_ids"].tolist()
        kept_lengths = random_sizes(len(text) - self.noise, len(self.sentinels), draws)
        cut_lengths = random_sizes(self.noise, len(self.sentinels), draws)
        spans = np.cumsum(np.stack([kept_lengths, cut_lengths], axis=1)).reshape(-1, 2)
        inputs, answer = corrupted(text, spans, self.sentinels, self.end)
        return {
            "input_ids": torch.tensor(inputs),
            "decoder_input_ids": torch.tensor([self.start, *answer[:-1]]),
            "labels": torch.tensor(answer),
        }


Corruption = TokenMasking | SpanCorruption
"""A function that corrupts one window."""


def random_sizes(total: int, count: int, draws: np.random.Generator) -> Tokens:
    """Divide `total` into `count` pieces of at least 1, all divisions equally likely; return their sizes."""
    cuts = np.sort(draws.choice(total - 1, count - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=total)


def span_sizes(options: Spans, length: int) -> tuple[int, int, int]:
    """Return the numbers of text tokens, of tokens cut out and of spans.

    The text is the longest one whose encoder inputs, with sentinels and the end token, have at most `length` tokens.
    """

    def sizes(text: int) -> tuple[int, int]:
        noise = min(max(1, round(text * options.share)), text - 1)
        return noise, min(max(1, round(noise / options.mean_length)), noise, text - noise)

    text = 2
    while (text + 1) - sizes(text + 1)[0] + sizes(text + 1)[1] + 1 <= length:
        text += 1
    return text, *sizes(text)


def cut_spans(options: Spans, tokenizer: Any, vocabulary: int, length: int, start: int) -> SpanCorruption:
    """Return the span corruption for an encoder that reads at most `length` tokens."""
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
