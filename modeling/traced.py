"""Whether something looks through a call at what it is made of, which then had better be plain operations."""

import torch
from torch.jit._trace import is_tracing
from torch.nn.modules.module import _has_any_global_hook


def traced() -> bool:
    """Whether a graph is being made of it, or `torch.func` transforms it, or all modules are watched."""
    return torch.compiler.is_compiling() or is_tracing() or transformed() or _has_any_global_hook()


def transformed() -> bool:
    """Whether `torch.func` does, which has no use for an operator with a backward pass of its own."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
