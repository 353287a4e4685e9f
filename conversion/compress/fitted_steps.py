"""Fits a layer's compressed attention to the source's by a few steps of Adam, after the closed forms.

The closed forms of `aligned_maps` and `fitted_output` minimise approximations of the error of the attention's output.
Steps from there minimise the error itself, of all projections and scalars at once. An error counts relative to its
token's hidden states, as the norm of the next block sees it.
"""

from itertools import cycle, islice
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from ..calibration.head_statistics import HeadStatistics, fast_products
from .fitted_output import AttentionCalls, output_change
from .head_groups import Counts
from .layer_rewrites import Tensors, as_stock
from .virtual_heads import ComponentHeads

STEPS, BATCH = 40, 2
"""A step takes the mean error of so many windows."""
RATE = 0.003
"""The first step's size relative to a tensor's root mean square; it falls to zero."""
BETAS = (0.9, 0.95)
VALIDATION_STRIDE = 4
"""Every fourth window is used to decide whether the steps reduced the error."""
MIN_ERROR = 1e-4
"""A smaller error is about the rounding of `fast_products`, and a fit to it would be one to noise."""
SEED = 0


def solve_layer(
    attention: nn.Module, statistics: HeadStatistics, calls: AttentionCalls, counts: Counts, as_written: bool = False
) -> Tensors:
    """Add the tensors that are fitted for these component heads to the statistics; returns equivalent stock tensors.

    `as_written` keeps the output projection that will be written, to which a router can be fitted.
    """
    heads = ComponentHeads(statistics.layout, counts)
    tensors = {name: tensor.cpu() for name, tensor in attention.state_dict().items()}
    statistics.sums |= heads.solved(statistics)
    compressed = heads.approximate(tensors, statistics)
    changed = {name: compressed[name] for name in compressed if not compressed[name].equal(tensors[name])}
    statistics.sums[heads.output_name] = output_change(attention, calls, changed)
    rewritten = heads.rewrite(tensors, statistics)
    fitted = fit_by_steps(attention, calls, rewritten, heads.fitted_parts(), counts.groups)
    statistics.sums |= {heads.fitted_name(part): tensor for part, tensor in fitted.items()}
    if not as_written and all(tensor.equal(rewritten[part]) for part, tensor in fitted.items()):
        return heads.approximate(tensors, statistics)  # rounds as the source does
    return as_stock(rewritten | fitted, counts.groups)


def fit_by_steps(attention: Any, calls: AttentionCalls, tensors: Tensors, parts: list[str], groups: int) -> Tensors:
    """Some `parts` of a stock layer's tensors with component heads after the steps, or before if the error rose."""
    device = attention.o_proj.weight.device
    others = {name: tensor.to(device, torch.float32) for name, tensor in tensors.items()}
    start = {name: others.pop(name) for name in parts if name in others}
    fitted = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}

    def error(of: Tensors, index: int) -> torch.Tensor:
        inputs, expected = calls.inputs[index].float(), calls.outputs[index].float()
        arguments = {"hidden_states": inputs, **calls.arguments}
        with fast_products():
            output = functional_call(attention, as_stock(others | of, groups), (), arguments)[0]
        return ((output.float() - expected).square().mean(-1) / calls.sizes[index]).mean()

    def mean_error(of: Tensors) -> float:
        return fmean(float(error(of, index)) for index in range(0, len(calls.inputs), VALIDATION_STRIDE))

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
    chosen = fitted if mean_error(fitted) < before else start  # start, too, if the error is NaN
    return {name: tensor.cpu() for name, tensor in chosen.items()}
