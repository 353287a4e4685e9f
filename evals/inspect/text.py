"""Checks the model and the text of a report before any work is done."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from crosshead.common.errors import EvalError
from crosshead.modeling import BACKBONES

from ..open_model import Opened

LONGEST_TEXT = 512
"""Tokens: what a page draws and stores grows with the square of this."""
_OURS = [each.model_type for each in BACKBONES]
MODEL_TYPES = (*(ours.removeprefix("crosshead_") for ours in _OURS), *_OURS)


@dataclass(frozen=True)
class Text:
    """A text as one tokenizer sees it."""

    name: str
    ids: torch.Tensor
    """(1, T)"""
    pieces: list[str]
    """What each token stands for."""
    starts: list[int]
    """Where each token begins in the text, in characters."""


def check_family(opened: Opened) -> None:
    """Whether the layers are of a form that is known here."""
    if opened.config.model_type not in MODEL_TYPES:
        raise EvalError(
            f"{opened.name} has model_type={opened.config.model_type!r}, which cannot be looked into: allowed are "
            f"{', '.join(MODEL_TYPES)}"
        )


def read_text(opened: Opened, name: str, text: str) -> Text:
    """The tokens of a text; `EvalError` where there are none, or too many."""
    if not text.strip():
        raise EvalError(f"the text {name!r} is empty")
    encoded = opened.tokenizer(text, return_offsets_mapping=True, verbose=False)
    ids, spans = encoded["input_ids"], encoded["offset_mapping"]
    _check_length(opened, name, spans)
    vocabulary = opened.config.vocab_size
    if max(ids) >= vocabulary:
        raise EvalError(
            f"the tokenizer of {opened.label} gives the token {max(ids)}, but the model's vocabulary ends at "
            f"{vocabulary - 1}: they do not belong together"
        )
    names = opened.tokenizer.convert_ids_to_tokens(ids)
    return Text(name, torch.tensor([ids]), *pieces_of(text, spans, names))


def _check_length(opened: Opened, name: str, spans: Sequence[tuple[int, int]]) -> None:
    context = getattr(opened.config, "max_position_embeddings", LONGEST_TEXT)
    limit = min(context, LONGEST_TEXT)
    if len(spans) > limit:
        reason = f"{opened.label} takes" if context < LONGEST_TEXT else "a page holds"
        raise EvalError(
            f"the text {name!r} has {len(spans):,} tokens, and {reason} {limit} at most: keep its first "
            f"{spans[limit - 1][1]:,} characters"
        )


def pieces_of(text: str, spans: Sequence[tuple[int, int]], names: Sequence[str]) -> tuple[list[str], list[int]]:
    """What each token stands for and where: its part of the text with the space before, or a special token's name.

    A character that several tokens spell out is the first one's; the others are empty.
    """
    pieces, starts, end = [], [], 0
    for (start, stop), name in zip(spans, names, strict=True):
        pieces.append(name if start == stop else text[end:stop])
        starts.append(end)
        end = max(end, stop)
    return pieces, starts
