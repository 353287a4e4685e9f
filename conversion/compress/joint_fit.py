"""Fits the compressed attention of all layers jointly, so that the converted model predicts what the source predicts.

The fits of single layers minimise errors of attention outputs, which do not show how much the predictions change, and
a layer cannot correct the errors of the layers after it. Adam then minimises the KL divergence from the source's
predictions on the calibration windows over all fitted tensors at once.
"""

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors import safe_open
from torch.func import functional_call
from torch.nn import functional

from crosshead.common.file_bytes import byte_size
from crosshead.common.free_memory import ROOM, fits_in_memory
from crosshead.common.progress import Advance, Progress

from ..architectures.families import FAMILIES
from ..calibration.calibration import FINGERPRINT, Calibration
from ..calibration.head_statistics import fast_products
from ..calibration.streamed_model import StreamedModel
from ..calibration.text import MAX_SAMPLED_PARAMETERS, SAMPLED_SHAPE, Text, parameters
from ..sources.resolve import Source
from ..writing.shard_writer import write_streamed
from .convert_layers import ROUTER, LayerRequest
from .fitted_router import heads_selected
from .fitted_steps import BATCH, run_adam
from .layer_rewrites import Tensors, as_stock

STEPS, ROUTED_STEPS, EPOCHS = 32, 10, 2
"""Maximum number of Adam steps, also with fitted routers, and maximum number of times that a window is read.

They read as many windows of the calibration text as they use, besides those that are sampled from the model.
"""
VALIDATION_WINDOWS = 4
"""Number of windows that decide whether Adam reduced the divergence."""
RATE = 4e-4
"""Initial learning rate relative to a tensor's root mean square; it decays linearly to zero."""
MIN_DIVERGENCE = 1e-3
"""Below this KL divergence, in nats per token, there is no fit: the rounding error of `fast_products` is near."""
CHUNK = 256
"""Number of tokens whose logits are in memory at a time."""
JOINT_FIT = "joint_fit"
"""Metadata key of a calibration file, and field of conversion.json, for the record of the fit."""


@dataclass(frozen=True)
class LayerStart:
    """The attention tensors of one compressed layer, from which the joint fit starts."""

    request: LayerRequest
    fixed: Tensors
    fitted: Tensors

    @classmethod
    def of(cls, request: LayerRequest, source: Source, calibration: Calibration, device: torch.device) -> "LayerStart":
        """Return the tensors that the fit of the single layer has stored in the calibration."""
        tensors = request.compressed(source.store, calibration.layer(request.index))
        tensors = {part: tensor.to(device, torch.float32) for part, tensor in tensors.items()}
        fitted = {part: tensors.pop(part) for part in request.jointly_fitted_parts() if part in tensors}
        return cls(request, tensors, fitted)

    def stock(self, fitted: Tensors) -> Tensors:
        """Return equivalent stock tensors, by their names in the decoder."""
        tensors = self.fixed | fitted
        if self.request.has_fewer_components:
            tensors = as_stock(tensors, self.request.counts().groups)
        prefix = f"layers.{self.request.index}.self_attn."
        return {prefix + part: tensor for part, tensor in tensors.items() if not part.startswith("mixers.")}

    def selected(self, model: Any) -> AbstractContextManager[None]:
        """Return a context in which the layer of a model has only the heads that the fitted router selects, if any."""
        routing = self.request.routing
        if routing is None:
            return nullcontext()
        attention = model.layers[self.request.index].self_attn
        size = attention.o_proj.weight.shape[1] // self.request.layout.query_heads
        return heads_selected(attention, self.fixed[ROUTER], routing, size)


def fits_jointly(layers: Sequence[LayerRequest], source: Source, text: Text) -> bool:
    """Return True if the tensors of all layers are fitted jointly, unless the memory is too small.

    Fitted routers need a given text: the default text is sampled in part, which takes as long as the joint fit.
    """
    if not any(layer.jointly_fitted_parts() for layer in layers) or FAMILIES[source.config["model_type"]].is_encoder:
        return False
    return (text.path is not None or not any(layer.routing for layer in layers)) and (
        parameters(source) <= MAX_SAMPLED_PARAMETERS
    )


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

    The record has the divergence before and after, or why the fit was left out. It is empty if the given calibration
    is returned: its tensors were fitted jointly by an earlier conversion, or cannot be improved.
    """
    if text.is_saved or not fits_jointly(layers, source, text):
        return calibration, {}
    file = folder / "joint.safetensors"
    if not file.exists():
        model = StreamedModel(source.store, stock, device=device)
        requests = [layer for layer in layers if layer.jointly_fitted_parts()]
        starts = [LayerStart.of(request, source, calibration, model.device) for request in requests]
        steps = ROUTED_STEPS if any(layer.routing for layer in layers) else STEPS
        tokens = fit_tokens(text, steps * BATCH, source, model, folder, progress).to(model.device)
        needed = memory_needed(parameters(source), starts, tokens, stock)
        if not fits_in_memory(needed, model.device):
            return calibration, {JOINT_FIT: {"left_out": f"it needs {byte_size(int(needed * ROOM))} of free memory"}}
        fitted, divergences = fit_tensors(model, tokens, starts, steps, partial(progress, "fitting"))
        changed = {
            request.joint_name(part): tensor.cpu()
            for request, tensors in zip(requests, fitted, strict=True)
            for part, tensor in tensors.items()
        }
        _write(file, calibration, changed, divergences)
    with safe_open(file, framework="pt") as opened:
        divergences = json.loads(opened.metadata()[JOINT_FIT])
    return Calibration(file), {JOINT_FIT: divergences} if divergences else {}


def memory_needed(parameters: int, layers: Sequence[LayerStart], tokens: torch.Tensor, config: Any) -> int:
    """Return the bytes of weights, fitted tensors with gradients and Adam's state, hidden states and activations."""
    windows, length = tokens.shape
    fitted = sum(tensor.numel() for layer in layers for tensor in layer.fitted.values())
    activations = length * config.num_hidden_layers * (10 * config.hidden_size + 4 * config.intermediate_size)
    logits = 4 * CHUNK * config.vocab_size
    return 4 * (parameters + 4 * fitted + windows * length * config.hidden_size + activations + logits)


def fit_tokens(
    text: Text, count: int, source: Source, model: StreamedModel, folder: Path, progress: Progress
) -> torch.Tensor:
    """Return windows of tokens (B, T): at most `count` of the calibration text, and the sampled ones."""
    calibrated = text.tokens(source, model, folder, progress)
    length = calibrated.shape[1]
    windows = text.windows(source, length, count, model.config.vocab_size)
    sampled = prod(SAMPLED_SHAPE) // length if text.is_sampled else 0
    return torch.cat([windows, calibrated[len(calibrated) - sampled :]])


@torch.no_grad()
def fit_tensors(
    model: StreamedModel, tokens: torch.Tensor, layers: Sequence[LayerStart], most_steps: int, advance: Advance
) -> tuple[list[Tensors], dict[str, float]]:
    """Return the fitted tensors of each layer, and the divergences; no divergences if the tensors are unchanged."""
    start = [layer.fitted for layer in layers]
    fitted = [{part: tensor.clone().requires_grad_() for part, tensor in parts.items()} for parts in start]
    with model.whole() as module, fast_products():

        @cache
        @torch.no_grad()
        def expected(index: int) -> torch.Tensor:
            return module.model(tokens[index : index + 1], use_cache=False).last_hidden_state[0]

        def last_hidden_state(variable: Sequence[Tensors], index: int) -> torch.Tensor:
            stock: Tensors = {}
            with ExitStack() as contexts:
                for layer, parts in zip(layers, variable, strict=True):
                    contexts.enter_context(layer.selected(module.model))
                    stock |= layer.stock(parts)
                return functional_call(module.model, stock, (tokens[index : index + 1],), {"use_cache": False})[0][0]

        def mean_divergence(variable: Sequence[Tensors]) -> float:
            selected = range(0, len(tokens), max(1, len(tokens) // VALIDATION_WINDOWS))
            pairs = ((last_hidden_state(variable, index), expected(index)) for index in selected)
            return fmean(divergence(module.lm_head, *pair)[0] for pair in pairs)

        def add_gradient(index: int) -> None:
            hidden = last_hidden_state(fitted, index)
            hidden.backward(divergence(module.lm_head, hidden, expected(index))[1] / BATCH)

        before = mean_divergence(start)
        if before <= MIN_DIVERGENCE:
            return start, {}
        tensors = [tensor for parts in fitted for tensor in parts.values()]
        steps = min(most_steps, -(-len(tokens) * EPOCHS // BATCH))
        run_adam(tensors, RATE, steps, len(tokens), add_gradient, advance)
        after = mean_divergence(fitted)
    if not after < before:  # also if the divergence is NaN
        return start, {}
    result = [{part: tensor.detach() for part, tensor in parts.items()} for parts in fitted]
    return result, {"divergence_before": round(before, 6), "divergence_after": round(after, 6)}


@torch.no_grad()
def divergence(head: Any, hidden: torch.Tensor, expected: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Return the mean KL divergence in nats of the predictions from last hidden states (T, hidden), and its gradient.

    The gradient is computed beside the divergence, because the logits of a whole window would need much memory.
    """
    total, gradients = 0.0, list[torch.Tensor]()
    for states, expected_states in zip(hidden.split(CHUNK), expected.split(CHUNK), strict=True):
        predicted, wanted = (head(states).float().log_softmax(-1) for states in (states, expected_states))
        total += float(functional.kl_div(predicted, wanted, log_target=True, reduction="sum"))
        gradients.append((predicted.exp_() - wanted.exp_()) @ head.weight)
    return total / len(hidden), torch.cat(gradients).to(hidden.dtype) / len(hidden)


def _write(file: Path, calibration: Calibration, changed: Tensors, divergences: dict[str, float]) -> None:
    """Write a calibration with some changed tensors and the record of the fit."""
    with safe_open(calibration.path, framework="pt") as opened:
        names = list(opened.keys())
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in names}
        new = {name: tuple(tensor.shape) for name, tensor in changed.items()}
        tensors = ({name: changed[name] if name in changed else opened.get_tensor(name)} for name in shapes | new)
        metadata = {FINGERPRINT: opened.metadata()[FINGERPRINT], JOINT_FIT: json.dumps(divergences)}
        partial_file = file.with_name(f"{file.name}.partial")
        write_streamed(partial_file, shapes | new, tensors, metadata)
    partial_file.replace(file)
