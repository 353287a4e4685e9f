"""Runs models on texts and reports the states of their layers as one JSON object, from which the page is made."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any

import torch

from crosshead.common.errors import EvalError
from crosshead.modeling.mechanisms.base import Mechanism

from ..open_model import Opened, check_backbone, check_tokens, load_model, open_model
from .layer import TOP, LayerStates, layer_record, record_states
from .matrices import description, matrix_records
from .pack import rounded

MAXIMUM_TOKENS = 512
"""A page stores and draws the square of this."""
Progress = Callable[[str, int, int], None]
"""Called with the stage, the layers done, and all layers."""


def inspect_report(names: Sequence[str], texts: dict[str, str], progress: Progress) -> dict[str, Any]:
    """The report of one or two models on texts, which are given by name."""
    opened = [open_model(name) for name in names]
    for each in opened:
        check_backbone(each)
    read = [[read_text(each, *text) for text in texts.items()] for each in opened]
    models = [model_record(*each, progress) for each in zip(opened, read, strict=True)]
    return {"longest_text": MAXIMUM_TOKENS, "top": TOP, "models": models}


def read_text(opened: Opened, name: str, text: str) -> tuple[torch.Tensor, dict[str, Any]]:
    """The tokens of a text (1, T), and its part of the report; `EvalError` if there are no tokens, or too many."""
    if not text.strip():
        raise EvalError(f"the text {name!r} is empty")
    encoded = opened.tokenizer(text, return_offsets_mapping=True, verbose=False)
    ids, spans = encoded["input_ids"], encoded["offset_mapping"]
    context = getattr(opened.config, "max_position_embeddings", MAXIMUM_TOKENS)
    limit = min(context, MAXIMUM_TOKENS)
    if len(spans) > limit:
        reason = f"{opened.label} takes" if context < MAXIMUM_TOKENS else "a page holds"
        raise EvalError(
            f"the text {name!r} has {len(spans):,} tokens, and {reason} at most {limit}: use its first "
            f"{spans[limit - 1][1]:,} characters"
        )
    check_tokens(ids, opened.config.vocab_size, f"the tokenizer of {opened.label}")
    pieces, starts = split_text(text, spans, opened.tokenizer.convert_ids_to_tokens(ids))
    return torch.tensor([ids]), {"name": name, "tokens": pieces, "starts": starts}


def split_text(text: str, spans: Sequence[tuple[int, int]], names: Sequence[str]) -> tuple[list[str], list[int]]:
    """The text of each token, with the space before it, and its position; a special token has its name as text.

    If several tokens encode one character, the first has it and the others are empty.
    """
    pieces, starts, end = [], [], 0
    for (start, stop), name in zip(spans, names, strict=True):
        pieces.append(name if start == stop else text[end:stop])
        starts.append(end)
        end = max(end, stop)
    return pieces, starts


def model_record(
    opened: Opened, texts: Sequence[tuple[torch.Tensor, dict[str, Any]]], progress: Progress
) -> dict[str, Any]:
    """One model: its sizes, the matrices of its mechanisms, and the states of its layers for each text."""
    # Eager attention returns its weights.
    model = load_model(opened, dtype=torch.float32, device_map=None, attn_implementation="eager")
    config, done = opened.config, count(1)
    attentions = [layer.self_attn for layer in model.model.layers]
    mechanisms = [(layer, *each) for layer, attention in enumerate(attentions) for each in _mechanisms(attention)]
    stage, total = f"{opened.label}:", len(attentions) * len(texts)
    progress(stage, 0, total)
    return {
        "name": opened.label,
        "model_type": config.model_type,
        "mixers": getattr(config, "mixers", None) or {},
        "mechanisms": {name: description(mechanism) for _, name, mechanism in mechanisms},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": len(attentions),
        "query_heads": config.num_attention_heads,
        "key_value_heads": config.num_key_value_heads,
        "head_dim": attentions[0].head_dim,
        "matrices": [record for each in mechanisms for record in matrix_records(*each)],
        "texts": [text | layer_records(model, ids, lambda: progress(stage, next(done), total)) for ids, text in texts],
    }


def _mechanisms(attention: Any) -> list[tuple[str, Mechanism]]:
    """The mechanisms of an attention module, by name; a stock module has none."""
    return list(getattr(attention, "mixers", {}).items())


@torch.no_grad()
def layer_records(model: Any, ids: torch.Tensor, advance: Callable[[], None]) -> dict[str, Any]:
    """The record of each layer for one text, made while the model runs: only one layer's weights are in memory."""
    layers: list[dict[str, Any]] = []

    def receive(states: LayerStates) -> None:
        layers.append(layer_record(states))
        advance()

    with ExitStack() as stack:
        for attention in (layer.self_attn for layer in model.model.layers):
            stack.enter_context(record_states(attention, receive))
        model(ids, use_cache=False)
    similarity = {}
    for side in ("patterns", "outputs"):
        means = [mean for layer in layers if (mean := layer["mean_similarity"][side]) is not None]
        similarity[side] = rounded(sum(means) / len(means)) if means else None
    return {"mean_similarity": similarity, "layers": layers}
