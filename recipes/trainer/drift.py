"""How far the parameters of mechanisms have moved since the start of a run."""

import copy
from statistics import mean

import torch
from torch import nn

from crosshead.modeling.mechanisms.base import Mechanism, ParameterModule

from .trainable import MIXERS

WRAPPERS = ("module.", "_orig_mod.", "base_model.model.", "_checkpoint_wrapped_module.", "modules_to_save.default.")
"""What data parallelism, compilation, peft and checkpointing put into names."""
COPY = ".original_module."
"""In the names of what peft keeps beside the modules that move."""


def starting_points(model: nn.Module) -> dict[str, torch.Tensor]:
    """By name, the parameters of mechanisms where they start from: neutral, or else as they are before the run.

    They are that if they start at random, or if their mechanism, as explicit with fewer components, starts as
    something else than the stock model. Without those that ZeRO-3 has taken apart as it made them: nothing of them is
    here to be looked at.
    """
    found: dict[str, torch.Tensor] = {}
    neutral = [name for name, mixer in model.named_modules() if isinstance(mixer, Mechanism) and _is_neutral(mixer)]
    for name, leaf in model.named_modules():
        if (
            isinstance(leaf, ParameterModule)
            and COPY not in f"{name}."
            and not any(map(_is_taken_apart, leaf.parameters()))
        ):
            first, second = (_started(leaf, seed) for seed in (0, 1))
            of_neutral = any(name.startswith(f"{mixer}.") for mixer in neutral)
            for part, parameter in leaf.named_parameters(recurse=False):
                same = of_neutral and torch.equal(first[part], second[part])
                found[plain_name(f"{name}.{part}")] = first[part] if same else _copied(parameter)
    return found


def _is_neutral(mixer: Mechanism) -> bool:
    return mixer.rules.starts_neutral(mixer.settings, mixer.layout)


def _copied(parameter: torch.Tensor) -> torch.Tensor:
    """On the processor; zeros where only another process has the values, which then tells of them."""
    value = parameter.detach()
    return torch.zeros(value.shape) if value.is_meta else value.to("cpu", torch.float32, copy=True)


def _is_taken_apart(parameter: torch.Tensor) -> bool:
    """DeepSpeed's ZeRO-3 leaves a parameter without elements, and what it was in an attribute."""
    return hasattr(parameter, "ds_shape")


def _started(leaf: ParameterModule, seed: int) -> dict[str, torch.Tensor]:
    again = copy.deepcopy(leaf).cpu()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        again.initialise(1.0)
    return {name: parameter.detach() for name, parameter in again.named_parameters(recurse=False)}


@torch.no_grad()
def moved(model: nn.Module, starts: dict[str, torch.Tensor]) -> dict[str, float]:
    """How far each mechanism is from its starting point: 1 is as far as a map is from zero; mean over tensors."""
    distances: dict[str, list[float]] = {}
    for name, parameter in model.named_parameters():
        start = starts.get(plain_name(name))
        if start is not None and not _is_taken_apart(parameter):
            now = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            distance = (now.float().cpu() - start.float()).norm() / start.shape[0] ** 0.5
            mechanism = plain_name(name).split(MIXERS)[1].split(".")[0]
            distances.setdefault(f"moved/{mechanism}", []).append(distance.item())
    return {name: mean(found) for name, found in distances.items()}


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers add to it."""
    for added in WRAPPERS:
        name = name.replace(added, "")
    return name
