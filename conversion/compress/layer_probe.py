"""What each layer's heads cost when they alone are compressed, in loss against a text (figure 8 of the MEA paper)."""

import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.nn import functional

from crosshead.common.errors import ConversionError
from crosshead.common.progress import Progress, silent

from ..architectures.families import FAMILIES, family_of, read_config, stock_shapes
from ..calibration.calibration import Observers, observe
from ..calibration.streamed_model import StreamedModel
from ..calibration.text import Text, default_text, load_tokenizer, read_text, windows
from ..plan import check_source
from ..sources.resolve import open_source
from .budget_search import STRIDE, by_layer, measure_losses
from .virtual_heads import METHODS


def probe_layers(
    source: str | Path,
    *,
    revision: str | None = None,
    method: str = "aligned",
    calibration: Path | None = None,
    text: Path | None = None,
    length: int = 512,
    count: int = 1,
    progress: Progress = silent,
) -> dict[str, Any]:
    """The loss of a stock model, and how much it rises for each layer, side and count of component heads.

    Measured on `count` windows of a text; `calibration` is what `method="aligned"` is fitted on.
    """
    if method not in METHODS:
        raise ConversionError(f"method={method!r} is not allowed: use one of {', '.join(METHODS)}")
    with tempfile.TemporaryDirectory() as scratch:
        origin = open_source(source, revision, scratch=Path(scratch))
        stock = read_config(origin.config, "stock", origin.origin["name"])
        check_source(origin.store, stock_shapes(stock), stock.tie_word_embeddings)
        if stock.num_key_value_heads < 2:
            raise ConversionError(f"{origin.origin['name']} has one KV head, which cannot be compressed")
        if length > stock.max_position_embeddings:
            raise ConversionError(
                f"--length {length} is more than the context of {origin.origin['name']}: "
                f"use {stock.max_position_embeddings} at most"
            )
        prose = default_text() if text is None else read_text(text)
        tokens = windows(load_tokenizer(origin), prose, length, count, stock.vocab_size)
        layouts = FAMILIES[stock.model_type].mixed.from_dict({**origin.config, "mixers": {}}).layouts()
        read = None
        if method == "aligned":
            observers = Observers({"statistics"}, layouts, [], family_of(stock).qkv_bias(stock))
            kept = Path(scratch, "calibration.safetensors")
            read = observe(origin, stock, Text.of(calibration, origin), observers, kept, progress)
        source_losses: dict[int, float] = {}

        def rise(window: int, expected: torch.Tensor, logits: torch.Tensor) -> float:
            if window not in source_losses:
                source_losses[window] = _loss(expected, tokens[window])
            return _loss(logits, tokens[window]) - source_losses[window]

        model = StreamedModel(origin.store, stock)
        rises = measure_losses(
            model, origin.store, layouts, read, method, tokens, lambda *done: progress("measuring", *done), rise
        )
    return {
        "source": origin.origin,
        "method": method,
        "heads": stock.num_key_value_heads,
        "tokens": tokens.numel(),
        "loss": fmean(source_losses.values()),
        "rises": by_layer(rises),
    }


def _loss(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    """Against the tokens, of one window (T), that follow every position that is judged."""
    following = tokens[1::STRIDE]
    return float(functional.cross_entropy(logits[: len(following)].float(), following))


def lines(report: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """What a plot shows: the rise at each layer, for each side and count."""
    found: dict[str, list[tuple[float, float]]] = {}
    for layer, sides in report["rises"].items():
        for side, counts in sides.items():
            for count, rise in counts.items():
                found.setdefault(f"{side}: {count} of {report['heads']}", []).append((int(layer), rise))
    return found
