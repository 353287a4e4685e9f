"""Fits a layer's compressed attention to the source's attention by a few steps of Adam, after the other fits.

The fits of `aligned_maps` and `fitted_output` minimise approximations of the error of the attention's output. Adam
then minimises the error itself over all projections and scalars jointly. A token's error is relative to the mean
square of its hidden state, as the norm of the next block sees it.
"""

from collections.abc import Callable, Sequence
from itertools import cycle, islice
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from crosshead.common.progress import Advance

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

    def add_gradient(index: int) -> None:
        (error(fitted, index) / BATCH).backward()

    before = mean_error(start)
    if before > MIN_ERROR:
        run_adam([*fitted.values()], RATE, STEPS, len(calls.inputs), add_gradient)
    fitted = {name: tensor.detach() for name, tensor in fitted.items()}
    chosen = fitted if mean_error(fitted) < before else start  # `start` also if the error is NaN
    return {name: tensor.cpu() for name, tensor in chosen.items()}


def run_adam(
    tensors: Sequence[torch.Tensor],
    rate: float,
    steps: int,
    windows: int,
    add_gradient: Callable[[int], None],
    advance: Advance = lambda *_: None,
) -> None:
    """Change tensors by steps of Adam; a step reads `BATCH` windows, in random order, and adds their gradients.

    `rate` is the initial learning rate relative to a tensor's root mean square; it decays linearly to zero.
    """
    groups = [{"params": [tensor], "lr": rate * float(tensor.detach().square().mean().sqrt())} for tensor in tensors]
    optimiser = torch.optim.Adam(groups, betas=BETAS)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, steps)
    order = cycle(torch.randperm(windows, generator=torch.Generator().manual_seed(SEED)).tolist())
    with torch.enable_grad():
        for step in range(steps):
            optimiser.zero_grad()
            for index in islice(order, BATCH):
                add_gradient(index)
            optimiser.step()
            schedule.step()
            advance(step + 1, steps)
