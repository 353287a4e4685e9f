"""Whether the weights of modules may be read from outside, in place of calling the modules."""

from torch import nn


def readable(*modules: nn.Module) -> bool:
    """Plain weights, on this device for good, that nobody watches or wraps."""
    if any(x._forward_hooks or x._forward_pre_hooks or "forward" in vars(x) for x in modules):
        return False
    weights = [weight for module in modules for weight in module.parameters()]
    return all(type(x) is nn.Parameter and not (x.is_meta or x.is_inference()) for x in weights)
