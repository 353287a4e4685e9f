"""Whether the weights of modules may be read from outside, in place of calling the modules."""

from torch import nn


def weights_of(*modules: nn.Module) -> list[nn.Parameter]:
    """All of them; for a module without others in it much sooner than `parameters()` tells, which every token asks."""
    found: list[nn.Parameter] = []
    for module in modules:
        own = module.parameters() if module._modules else module._parameters.values()
        found += [weight for weight in own if weight is not None]
    return found


def readable(*modules: nn.Module) -> bool:
    """Plain weights, on this device for good, that nobody watches or wraps."""
    if any(_hooks(x) or "forward" in vars(x) for x in modules):
        return False
    return all(type(x) is nn.Parameter and not (x.is_meta or x.is_inference()) for x in weights_of(*modules))


def _hooks(module: nn.Module) -> bool:
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)
