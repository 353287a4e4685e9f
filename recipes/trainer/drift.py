"""Drift of mechanisms: distance of their parameters from their starting point, logged as a metric."""

import copy
from statistics import mean

import torch
from torch import nn

from crosshead.modeling.mechanisms.base import Mechanism, ParameterModule

from .parameters import MIXERS

WRAPPERS = ("module.", "_orig_mod.", "base_model.model.", "_checkpoint_wrapped_module.", "modules_to_save.default.")
"""Parts of parameter names that data parallelism, compilation, peft and activation checkpointing add."""
PEFT_COPY = ".original_module."
"""Part of the names of peft's frozen copies of trained modules."""


def starting_points(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the starting point of each mechanism parameter, by name: its neutral value, or else its current value.

    Parameters with random initialisation have no neutral value, nor have mechanisms that do not start as the stock
    model, such as explicit with fewer components. Parameters that ZeRO-3 sharded at creation are left out.
    """
    starts: dict[str, torch.Tensor] = {}
    neutral = tuple(
        f"{name}."
        for name, mixer in model.named_modules()
        if isinstance(mixer, Mechanism) and mixer.rules.starts_neutral(mixer.settings, mixer.layout)
    )
    for name, leaf in model.named_modules():
        if not isinstance(leaf, ParameterModule) or MIXERS not in name or PEFT_COPY in f"{name}.":
            continue  # stock TransNeXt also has modules of this class
        if any(map(_is_zero3_shard, leaf.parameters())):
            continue
        first, second = (_initialised(leaf, seed) for seed in (0, 1))  # equal unless the start is random
        for part, parameter in leaf.named_parameters(recurse=False):
            is_fixed = name.startswith(neutral) and torch.equal(first[part], second[part])
            value = torch.zeros_like(parameter, device="cpu") if parameter.is_meta else parameter  # meta: not logged
            starts[plain_name(f"{name}.{part}")] = (
                first[part] if is_fixed else value.detach().to("cpu", torch.float32, copy=True)
            )
    return starts


def _is_zero3_shard(parameter: torch.Tensor) -> bool:
    """Whether DeepSpeed ZeRO-3 has emptied the parameter; its shape is then in the attribute `ds_shape`."""
    return hasattr(parameter, "ds_shape")


def _initialised(leaf: ParameterModule, seed: int) -> dict[str, torch.Tensor]:
    clone = copy.deepcopy(leaf).cpu()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        clone.initialise(1.0)
    return {name: parameter.detach() for name, parameter in clone.named_parameters(recurse=False)}


@torch.no_grad()
def drift(model: nn.Module, starts: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the distance of each mechanism from its starting point, as a mean over tensors.

    It is the norm of the difference divided by the root of the first dimension: 1 between the identity and zero.
    """
    distances: dict[str, list[float]] = {}
    for name, parameter in model.named_parameters():
        start = starts.get(plain_name(name))
        if start is not None and not _is_zero3_shard(parameter):
            now = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            distance = (now.float().cpu() - start.float()).norm() / start.shape[0] ** 0.5
            mechanism = plain_name(name).split(MIXERS)[1].split(".")[0]
            distances.setdefault(f"drift/{mechanism}", []).append(distance.item())
    return {name: mean(values) for name, values in distances.items()}


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers add."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
