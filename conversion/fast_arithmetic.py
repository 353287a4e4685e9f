"""The arithmetic that observes a model: bfloat16 where the processor has instructions for it.

There its matrix products take a quarter of the time of float32. What is observed are sums over many tokens, for which
its three digits are enough; what is written or measured is never computed in it.
"""

import torch


def fast_dtype() -> torch.dtype:
    """What matrix products are computed in fastest."""
    in_hardware = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if in_hardware else torch.float32


def fast_products() -> torch.autocast:
    """A context in which matrix products are computed so, and all else as it is."""
    dtype = fast_dtype()
    return torch.autocast("cpu", dtype, enabled=dtype != torch.float32)


def full_products() -> torch.autocast:
    """A context in which `fast_products` around it has no effect."""
    return torch.autocast("cpu", enabled=False)
