"""A model and a text to look inside with: loaded, and checked before any work is done."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from crosshead.modeling.configuration_crosshead import (
    CrossheadLlamaConfig,
    CrossheadQwen2Config,
    CrossheadQwen3Config,
    CrossheadQwen3MoeConfig,
)

LONGEST_TEXT = 512
"""Tokens: what a page draws and stores grows with the square of this."""
_OURS = [
    each.model_type
    for each in (CrossheadLlamaConfig, CrossheadQwen2Config, CrossheadQwen3Config, CrossheadQwen3MoeConfig)
]
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


@dataclass(frozen=True)
class Subject:
    """What is looked into, before its weights are read."""

    path: str
    config: Any
    tokenizer: Any

    @property
    def name(self) -> str:
        """The Hub id, or the folder's own name: a page says nothing of where it was made."""
        return Path(self.path).resolve().name if Path(self.path).is_dir() else self.path


def find_subject(path: str) -> Subject:
    """The configuration and tokenizer of a causal language model, in a folder or on the Hub."""
    config = _part(AutoConfig, path, "cannot be loaded")
    _check_kind(config, path)
    return Subject(path, config, _part(AutoTokenizer, path, "has no tokenizer that loads: save one beside the model"))


def load_model(subject: Subject) -> Any:
    """The model in float32, with the attention that returns its weights."""
    options = {"dtype": torch.float32, "attn_implementation": "eager", "use_safetensors": True}
    model, report = _part(AutoModelForCausalLM, subject.path, "cannot be loaded", output_loading_info=True, **options)
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(f"{subject.path!r} lacks {len(missing)} tensors, {missing[0]} first: it is not complete")
    return model.eval()


def _part(kind: Any, path: str, failure: str, **options: Any) -> Any:
    try:
        return kind.from_pretrained(path, trust_remote_code=False, **options)
    except Exception as error:  # its files may be broken in many ways
        place = "" if Path(path).is_dir() else "is no folder, and on the Hub it "
        raise ValueError(f"{path!r} {place}{failure} ({error})") from error


def _check_kind(config: Any, name: str) -> None:
    if config.model_type not in MODEL_TYPES:
        raise ValueError(
            f"{name!r} has model_type={config.model_type!r}, which cannot be looked into: allowed are "
            f"{', '.join(MODEL_TYPES)}"
        )
    classes = config.architectures or []
    if classes and not any(each.endswith("ForCausalLM") for each in classes):
        raise ValueError(f"{name!r} is a {classes[0]}, not a causal language model")


def read_text(subject: Subject, name: str, text: str) -> Text:
    """The tokens of a text; `ValueError` where there are none, or too many."""
    if not text.strip():
        raise ValueError(f"the text {name!r} is empty")
    encoded = subject.tokenizer(text, return_offsets_mapping=True, verbose=False)
    ids, spans = encoded["input_ids"], encoded["offset_mapping"]
    _check_length(subject, name, spans)
    vocabulary = subject.config.vocab_size
    if max(ids) >= vocabulary:
        raise ValueError(
            f"the tokenizer of {subject.name} gives the token {max(ids)}, but the model's vocabulary ends at "
            f"{vocabulary - 1}: they do not belong together"
        )
    names = subject.tokenizer.convert_ids_to_tokens(ids)
    return Text(name, torch.tensor([ids]), *pieces_of(text, spans, names))


def _check_length(subject: Subject, name: str, spans: Sequence[tuple[int, int]]) -> None:
    context = getattr(subject.config, "max_position_embeddings", LONGEST_TEXT)
    limit = min(context, LONGEST_TEXT)
    if len(spans) > limit:
        reason = f"{subject.name} takes" if context < LONGEST_TEXT else "a page holds"
        raise ValueError(
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
