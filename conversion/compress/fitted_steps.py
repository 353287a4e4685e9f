"""Fits a layer's compressed attention to the source's attention by a few steps of Adam, after the other fits.

The fits of `aligned_maps` and `fitted_output` minimise approximations of the error of the attention's output. Adam
then minimises the error itself over all projections and scalars jointly. A token's error is relative to the mean
square of its hidden state, as the norm of the next block sees it.
"""

from itertools import cycle, islice
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from ..calibration.head_statistics import HeadStatistics, fast_products
from .component_heads import ComponentHeads
from .fitted_output import AttentionCalls, output_change
from .head_groups import Counts
from .layer_rewrites import Tensors, as_stock

STEPS, BATCH = 40, 2
"""Number of Adam steps, and number of windows per step."""
RATE = 0.003
"""Initial learning rate relative to a tensor's root mean square; it decays linearly to zero."""
BETAS = (0.9, 0.95)
"""Decay rates of Adam."""
VALIDATION_STRIDE = 4
"""Every fourth window is used to decide whether Adam reduced the error."""
MIN_ERROR = 1e-4
"""Below this relative error Adam is skipped: it is about the rounding error of `fast_products`, which is noise."""
SEED = 0
"""Seed of the order of windows."""


def solve_layer(
    attention: nn.Module, statistics: HeadStatistics, calls: AttentionCalls, counts: Counts, as_written: bool = False
) -> Tensors:
    """Fit a layer for some component counts: add the tensors to the statistics and return equivalent stock tensors.

    With `as_written`, the output projection is returned as it will be written, so that a router can be fitted to it.
    """
    heads = ComponentHeads(statistics.layout, counts)
    tensors = {name: tensor.cpu() for name, tensor in attention.state_dict().items()}
    statistics.sums |= heads.fitted(statistics)
    compressed = heads.approximate(tensors, statistics)
    changed = {name: compressed[name] for name in compressed if not compressed[name].equal(tensors[name])}
    statistics.sums[heads.output_name] = output_change(attention, calls, changed)
    rewritten = heads.rewrite(tensors, statistics)
    fitted = fit_by_steps(attention, calls, rewritten, heads.fitted_parts(), counts.groups)
    statistics.sums |= {heads.fitted_name(part): tensor for part, tensor in fitted.items()}
    if not as_written and all(tensor.equal(rewritten[part]) for part, tensor in fitted.items()):
        return heads.approximate(tensors, statistics)  # same rounding as in the source
    return as_stock(rewritten | fitted, counts.groups)


def fit_by_steps(attention: Any, calls: AttentionCalls, tensors: Tensors, parts: list[str], groups: int) -> Tensors:
    """Return the `parts` of a layer's tensors after Adam, or unchanged if the error did not fall."""
    device = attention.o_proj.weight.device
    fixed = {name: tensor.to(device, torch.float32) for name, tensor in tensors.items()}
    start = {name: fixed.pop(name) for name in parts if name in fixed}
    fitted = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}

    def error(variable: Tensors, index: int) -> torch.Tensor:
        inputs, expected = calls.inputs[index].float(), calls.outputs[index].float()
        arguments = {"hidden_states": inputs, **calls.arguments}
        with fast_products():
            output = functional_call(attention, as_stock(fixed | variable, groups), (), arguments)[0]
        return ((output.float() - expected).square().mean(-1) / calls.sizes[index]).mean()

    def mean_error(variable: Tensors) -> float:
        return fmean(float(error(variable, index)) for index in range(0, len(calls.inputs), VALIDATION_STRIDE))

    rates = {name: RATE * float(tensor.square().mean().sqrt()) for name, tensor in start.items()}
    optimiser = torch.optim.Adam([{"params": [fitted[name]], "lr": rates[name]} for name in fitted], betas=BETAS)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, STEPS)
    order = cycle(torch.randperm(len(calls.inputs), generator=torch.Generator().manual_seed(SEED)).tolist())
    before = mean_error(start)
    with torch.enable_grad():
        for _ in range(STEPS if before > MIN_ERROR else 0):
            optimiser.zero_grad()
            for index in islice(order, BATCH):
                (error(fitted, index) / BATCH).backward()
            optimiser.step()
            schedule.step()
    fitted = {name: tensor.detach() for name, tensor in fitted.items()}
    chosen = fitted if mean_error(fitted) < before else start  # `start` also if the error is NaN
    return {name: tensor.cpu() for name, tensor in chosen.items()}
