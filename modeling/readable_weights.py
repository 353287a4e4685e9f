"""Whether the weights of modules may be read from outside, in place of calling the modules.

Every token of every layer asks: loops here, where a comprehension would be a call more.
"""

from torch import nn


def weights_of(*modules: nn.Module) -> list[nn.Parameter]:
    """All of them; for a module without others in it much sooner than `parameters()` tells."""
    found: list[nn.Parameter] = []
    for module in modules:
        for weight in module.parameters() if module._modules else module._parameters.values():
            if weight is not None:
                found.append(weight)
    return found


def readable(*modules: nn.Module) -> bool:
    """Plain weights, on this device for good, that nobody watches or wraps."""
    for module in modules:
        if watched_or_wrapped(module):
            return False
    for weight in weights_of(*modules):
        if type(weight) is not nn.Parameter or weight.is_meta or weight.is_inference():
            return False
    return True


def await_a_step(*modules: nn.Module) -> bool:
    """Whether there are gradients, by which weights may change at any time."""
    return any(weight.grad is not None for weight in weights_of(*modules))


def watched_or_wrapped(module: nn.Module) -> bool:
    """Whether calling it does more than its class says."""
    state = module.__dict__
    forward = state["_forward_hooks"] or state["_forward_pre_hooks"]
    return bool(forward or state["_backward_hooks"] or state["_backward_pre_hooks"] or "forward" in state)
