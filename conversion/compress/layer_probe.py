"""Measures the loss on a text if a single layer has fewer component heads (figure 8 of the MEA paper).

`probe_budget` sums KL divergences over layers, for fewer component heads or fewer active heads: the expected loss of a
whole model for every budget of the KV cache or of active heads.
"""

import tempfile
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.nn import functional

from crosshead.common.errors import ConversionError
from crosshead.common.plain_text import read_text
from crosshead.common.progress import Progress, silent
from crosshead.common.torch_state import default_torch_state

from ..architectures.families import FAMILIES, family_of, read_config, tensor_shapes, tied_tensors
from ..calibration.calibration import Observers, observe
from ..calibration.streamed_model import StreamedModel
from ..calibration.text import Text
from ..plan import check_source
from ..sources.resolve import Source, open_source
from ..sources.tensor_store import stored_dtype
from .budget_search import (
    STRIDE,
    TRIAL_DOCUMENTATION,
    ActiveTrials,
    ComponentTrials,
    Losses,
    by_layer,
    choose,
    choose_active,
    divergence,
    measure_losses,
)
from .component_heads import METHODS
from .head_groups import Counts

BUDGETS = [percent / 100 for percent in range(5, 100, 5)]
"""Budgets as fractions of the source's KV cache, or of all heads."""
LENGTH = 512
"""Tokens per window, if the context of the model is not shorter."""


@default_torch_state()
def probe_layers(source: str | Path, **options: Any) -> dict[str, Any]:
    """Return the loss of a stock model, and its increase for each layer, side and number of component heads.

    Losses are measured on `count` windows of `text`; `method="aligned"` is fitted to `calibration`. `options` are the
    keyword arguments of `_measured`.
    """
    report, rises, _ = _measured(source, **options)
    return report | {"rises": by_layer(rises)}


@default_torch_state()
def probe_budget(source: str | Path, *, active: bool = False, **options: Any) -> dict[str, Any]:
    """Return the expected increase of the loss, and the heads of each layer, for budgets of KV cache or active heads.

    As in a conversion, the increase is measured as KL divergence from the source, which equals the increase of the
    loss on text sampled from the source, and needs less text. The options are those of `probe_layers`. The curve omits
    budgets that are too small, or that give the same heads as the next smaller budget.
    """
    report, rises, config = _measured(source, active=active, by_divergence=True, **options)
    curve: list[dict[str, Any]] = []
    for budget in BUDGETS:
        try:
            point = _point(rises, config, budget, active)
        except ConversionError:
            continue
        if not curve or point != curve[-1] | {"budget": budget}:
            curve.append(point)
    return report | {"rises": by_layer(rises), "curve": curve}


def _point(rises: Losses, config: Any, budget: float, active: bool) -> dict[str, Any]:
    """Return the point of the curve for a budget of active heads or of the KV cache."""
    layouts = config.layouts()
    choice = choose_active(rises, layouts, budget) if active else choose(rises, layouts, budget, config.dtype)
    used = {"active" if active else "cache": choice.fraction}
    return {"budget": budget, **used, "expected_rise": round(choice.loss, 6), **choice.heads}


def _measured(
    source: str | Path,
    *,
    active: bool = False,
    by_divergence: bool = False,
    revision: str | None = None,
    method: str = "aligned",
    calibration: Path | None = None,
    text: Path | None = None,
    length: int | None = None,
    count: int = 1,
    device: str = "cpu",
    progress: Progress = silent,
) -> tuple[dict[str, Any], Losses, Any]:
    """Return a report on model and text, the increase of the loss for each trial, and the crosshead config."""
    _check_method(method, active, calibration)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = open_source(source, revision, scratch=Path(scratch))
        stock, length = _checked_config(checkpoint, length, active)
        measured_text = Text(text, documents=None if text is None else read_text(text, ConversionError))
        tokens = measured_text.windows(checkpoint, length, count, stock.vocab_size, documentation=TRIAL_DOCUMENTATION)
        config = FAMILIES[stock.model_type].crosshead.from_dict({**checkpoint.config, "mixers": {}})
        config.dtype = config.dtype or stored_dtype(checkpoint.store)
        layouts = config.layouts()
        model, fit_text = StreamedModel(checkpoint.store, stock, device=device), Text.of(calibration, checkpoint)
        if active and fit_text.is_saved:
            raise ConversionError(f"--active fits routers to a text: name one instead of --calibration {calibration}")
        if active:
            trials: ComponentTrials | ActiveTrials = ActiveTrials(
                model, fit_text.tokens(checkpoint, model, Path(scratch), progress)
            )
        else:
            statistics = None
            if method == "aligned":
                observers = Observers({"statistics"}, layouts, [], family_of(stock).qkv_bias(stock))
                cached = Path(scratch, "calibration.safetensors")
                statistics = observe(checkpoint, stock, fit_text, observers, cached, progress, device=device)
            unchanged = [Counts(layout.key_value_heads, layout.key_value_heads) for layout in layouts]
            trials = ComponentTrials(checkpoint.store, stock, layouts, unchanged, statistics, method)
        source_losses: dict[int, float] = {}

        def rise(window: int, expected: torch.Tensor, logits: torch.Tensor) -> float:
            if window not in source_losses:
                source_losses[window] = _loss(expected, tokens[window])
            if by_divergence:
                return divergence(window, expected, logits)
            return _loss(logits, tokens[window]) - source_losses[window]

        rises = measure_losses(model, [trials], tokens, partial(progress, "measuring"), rise)
    report = {
        "source": checkpoint.origin,
        "method": "calibrated" if active else method,
        "heads": stock.num_attention_heads if active else stock.num_key_value_heads,
        "tokens": tokens.numel(),
        "loss": fmean(source_losses.values()),
    }
    return report, rises, config


def _check_method(method: str, active: bool, calibration: Path | None) -> None:
    """Raise `ConversionError` if the method is unknown, or incompatible with other options."""
    if method not in METHODS:
        raise ConversionError(f"method={method!r} is not allowed: use one of {', '.join(METHODS)}")
    if method != "aligned" and calibration is not None:
        raise ConversionError(f"--calibration has no effect with --method {method}: leave it out")
    if active and method != "aligned":
        raise ConversionError(f"--method {method} is for component heads: leave it out with --active")


def _checked_config(checkpoint: Source, length: int | None, active: bool) -> tuple[Any, int]:
    """Return the config and the tokens per window; `ConversionError` unless it is a decoder with heads to reduce."""
    name = checkpoint.label
    stock = read_config(checkpoint.config, "stock", name)
    if family_of(stock).is_encoder:
        raise ConversionError(f"{name} is not a causal language model, whose loss is measured: give one")
    if family_of(stock).latent and not active:
        raise ConversionError(
            f"{name} expands keys and values from one latent vector: there are no KV heads to combine"
        )
    check_source(checkpoint.store, tensor_shapes(stock), tied_tensors(stock))
    if active and stock.num_attention_heads < 2:
        raise ConversionError(f"{name} has one head, which is always active")
    if not active and stock.num_key_value_heads < 2:
        raise ConversionError(f"{name} has one KV head, which cannot be compressed")
    if length is not None and length > stock.max_position_embeddings:
        raise ConversionError(
            f"--length {length} is more than the context of {name}: use at most {stock.max_position_embeddings}"
        )
    return stock, length or min(LENGTH, stock.max_position_embeddings)


def _loss(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    """Return the cross entropy of the tokens that follow the evaluated positions of one window (T)."""
    following = tokens[1::STRIDE].to(logits.device)
    return float(functional.cross_entropy(logits[: len(following)].float(), following))


def budget_lines(report: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Return the line of a plot: (fraction of the source's cache or of all heads, expected increase of the loss)."""
    return {
        "expected": [(point.get("active", point.get("cache")), point["expected_rise"]) for point in report["curve"]]
    }


def lines(report: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Return the lines of a plot: (layer, increase of the loss), for each side and number of heads."""
    rises = report["rises"]
    return {
        f"{side}: {count} of {report['heads']}": [(int(layer), rises[layer][side][count]) for layer in rises]
        for side, counts in rises["0"].items()
        for count in counts
    }
