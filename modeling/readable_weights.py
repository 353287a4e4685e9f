"""Whether the weights of modules may be read from outside, in place of calling the modules."""

from torch import nn


def readable(*modules: nn.Module) -> bool:
    """Plain weights, on this device for good, that nobody watches or wraps."""
    if any(_hooks(x) or "forward" in vars(x) for x in modules):
        return False
    weights = [weight for module in modules for weight in module.parameters()]
    return all(type(x) is nn.Parameter and not (x.is_meta or x.is_inference()) for x in weights)


def _hooks(module: nn.Module) -> bool:
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)
