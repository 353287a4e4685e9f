"""Fits the component heads of all layers jointly, so that the converted model predicts what the source predicts.

The fits of single layers minimise errors of attention outputs, which do not show how much the predictions change, and
a layer cannot correct the errors of the layers after it. Adam then minimises the KL divergence from the source's
predictions on the calibration windows over all fitted tensors at once.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors import safe_open
from torch.func import functional_call
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from crosshead.common.free_memory import fits_in_memory
from crosshead.common.progress import Advance, Progress

from ..calibration.calibration import FINGERPRINT, Calibration
from ..calibration.head_statistics import HeadStatistics, fast_products
from ..calibration.streamed_model import StreamedModel
from ..calibration.text import MAX_SAMPLED_PARAMETERS, SAMPLED_SHAPE, Text, parameters
from ..sources.resolve import Source
from ..writing.shard_writer import write_streamed
from .convert_layers import LayerRequest
from .fitted_steps import BATCH, BETAS, SEED
from .layer_rewrites import Tensors, as_stock, read_attention

WINDOWS = 64
"""Maximum number of windows of the calibration text, without those that are sampled from the model."""
STEPS, EPOCHS = 32, 2
"""Maximum number of Adam steps, and maximum number of times that a window is read."""
VALIDATION_WINDOWS = 8
"""Number of windows that decide whether Adam reduced the divergence."""
RATE = 4e-4
"""Initial learning rate relative to a tensor's root mean square; it decays linearly to zero."""
MIN_DIVERGENCE = 1e-3
"""Below this KL divergence, in nats per token, Adam is skipped: the rounding error of `fast_products` is near."""
BYTES_PER_PARAMETER = 8
"""Memory for the weights in float32, the gradients and the states between layers, relative to the parameters."""
CHUNK = 256
"""Number of tokens whose logits are in memory at a time."""
JOINT_FIT = "joint_fit"
"""Metadata key of a calibration file, and field of conversion.json, for the divergence before and after the fit."""


@dataclass(frozen=True)
class LayerStart:
    """The attention tensors of one layer with component heads, from which the joint fit starts."""

    index: int
    groups: int
    fixed: Tensors
    fitted: Tensors

    @classmethod
    def of(cls, request: LayerRequest, source: Source, calibration: Calibration, device: torch.device) -> "LayerStart":
        """Return the tensors that the fit of the single layer has stored in the calibration."""
        heads = request.component_heads()
        statistics = HeadStatistics(request.layout, calibration.layer(request.index)["statistics"])
        tensors = heads.rewrite(read_attention(source.store, request.names), statistics)
        tensors = {part: tensor.to(device, torch.float32) for part, tensor in tensors.items()}
        fitted = {part: tensors.pop(part) for part in heads.fitted_parts() if part in tensors}
        return cls(request.index, heads.counts.groups, tensors, fitted)

    def stock(self, fitted: Tensors) -> Tensors:
        """Return equivalent stock tensors, by their names in the decoder."""
        stock = as_stock(self.fixed | fitted, self.groups)
        return {f"layers.{self.index}.self_attn.{part}": tensor for part, tensor in stock.items()}


def fit_jointly(
    layers: Sequence[LayerRequest],
    calibration: Calibration,
    source: Source,
    stock: Any,
    text: Text,
    folder: Path,
    progress: Progress,
    device: str,
) -> tuple[Calibration, dict[str, Any]]:
    """Return a calibration with jointly fitted tensors, and the record of it; reuses the file in `folder`.

    The given calibration is returned, with an empty record, if it was saved by an earlier conversion, if heads are
    routed, if no layer has fewer components, or if the model is too large.
    """
    requests = [layer for layer in layers if layer.method == "aligned" and layer.has_fewer_components]
    size = parameters(source)
    if not requests or text.is_saved or any(layer.routing for layer in layers) or size > MAX_SAMPLED_PARAMETERS:
        return calibration, {}
    file = folder / "joint.safetensors"
    if not file.exists():
        model = StreamedModel(source.store, stock, device=device)
        if not fits_in_memory(BYTES_PER_PARAMETER * size, model.device):
            return calibration, {}
        starts = [LayerStart.of(request, source, calibration, model.device) for request in requests]
        tokens = fit_tokens(text, source, model, folder, progress).to(model.device)
        fitted, divergences = run_adam(model, tokens, starts, partial(progress, "fitting"))
        changed = {
            f"{request.index}.statistics.{request.component_heads().fitted_name(part)}": tensor.cpu()
            for request, tensors in zip(requests, fitted, strict=True)
            for part, tensor in tensors.items()
        }
        _write(file, calibration, changed, divergences)
    with safe_open(file, framework="pt") as opened:
        return Calibration(file), {JOINT_FIT: json.loads(opened.metadata()[JOINT_FIT])}


def fit_tokens(text: Text, source: Source, model: StreamedModel, folder: Path, progress: Progress) -> torch.Tensor:
    """Return windows of tokens (B, T): more of the calibration text than single layers need, and the sampled ones."""
    calibrated = text.tokens(source, model, folder, progress)
    length = calibrated.shape[1]
    windows = text.windows(source, length, WINDOWS, model.config.vocab_size)
    sampled = prod(SAMPLED_SHAPE) // length if text.is_sampled else 0
    return torch.cat([windows, calibrated[len(calibrated) - sampled :]])


@torch.no_grad()
def run_adam(
    model: StreamedModel, tokens: torch.Tensor, layers: Sequence[LayerStart], advance: Advance
) -> tuple[list[Tensors], dict[str, float]]:
    """Return the fitted tensors of each layer, unchanged if the divergence did not fall, and the divergences."""
    start = [layer.fitted for layer in layers]
    fitted = [{part: tensor.clone().requires_grad_() for part, tensor in parts.items()} for parts in start]
    with model.whole() as module, fast_products():
        expected = [module.model(window, use_cache=False).last_hidden_state for window in tokens.split(1)]

        def divergence(variable: Sequence[Tensors], index: int) -> torch.Tensor:
            stock: Tensors = {}
            for layer, parts in zip(layers, variable, strict=True):
                stock |= layer.stock(parts)
            hidden = functional_call(module.model, stock, (tokens[index : index + 1],), {"use_cache": False})[0]
            pairs = zip(hidden[0].split(CHUNK), expected[index][0].split(CHUNK), strict=True)
            chunks = [checkpoint(_divergence, module.lm_head, *pair, use_reentrant=False) for pair in pairs]
            return torch.stack(chunks).sum() / tokens.shape[1]

        def mean_divergence(variable: Sequence[Tensors]) -> float:
            every = max(1, len(tokens) // VALIDATION_WINDOWS)
            return fmean(float(divergence(variable, index)) for index in range(0, len(tokens), every))

        before = mean_divergence(start)
        tensors = [tensor for parts in fitted for tensor in parts.values()]
        rates = [RATE * float(tensor.square().mean().sqrt()) for tensor in tensors]
        groups = [{"params": [tensor], "lr": rate} for tensor, rate in zip(tensors, rates, strict=True)]
        optimiser = torch.optim.Adam(groups, betas=BETAS)
        steps = min(STEPS, -(-len(tokens) * EPOCHS // BATCH))
        schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, steps)
        order = cycle(torch.randperm(len(tokens), generator=torch.Generator().manual_seed(SEED)).tolist())
        with torch.enable_grad():
            for step in range(steps if before > MIN_DIVERGENCE else 0):
                optimiser.zero_grad()
                for index in islice(order, BATCH):
                    (divergence(fitted, index) / BATCH).backward()
                optimiser.step()
                schedule.step()
                advance(step + 1, steps)
        after = mean_divergence(fitted)
    chosen = fitted if after < before else start  # `start` also if the divergence is NaN
    result = [{part: tensor.detach() for part, tensor in parts.items()} for parts in chosen]
    return result, {"divergence_before": round(before, 6), "divergence_after": round(min(before, after), 6)}


def _divergence(head: Any, hidden: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the KL divergence in nats, summed over the tokens of last hidden states (T, hidden)."""
    predicted, wanted = (head(states).float().log_softmax(-1) for states in (hidden, expected))
    return functional.kl_div(predicted, wanted, log_target=True, reduction="sum")


def _write(file: Path, calibration: Calibration, changed: Tensors, divergences: dict[str, float]) -> None:
    """Write a calibration with some changed tensors and the record of the fit."""
    with safe_open(calibration.path, framework="pt") as opened:
        names = list(opened.keys())
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in names}
        tensors = ({name: changed.get(name, opened.get_tensor(name))} for name in names)
        metadata = {FINGERPRINT: opened.metadata()[FINGERPRINT], JOINT_FIT: json.dumps(divergences)}
        partial_file = file.with_name(f"{file.name}.partial")
        write_streamed(partial_file, shapes, tensors, metadata)
    partial_file.replace(file)
