"""Compiles the Triton kernels for an H100 without a GPU, and reports the resources of each.

usage: python tests/compile_kernels.py {mixture|token|talking}

Prints a line of JSON per kernel and shape: shared memory and binary size in bytes. Needs Triton without its
interpreter; no kernel is run.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from crosshead.modeling.kernels.routed_decode_triton import decode_selected
from crosshead.modeling.kernels.routed_triton import attend_selected
from crosshead.modeling.kernels.talking_triton import TILES, TalkingCall, attend_in_tiles, fits

TOKENS, PAST, HEADS, GROUPS = 61, 1101, 8, 2
"""Sequence length, cache length, query heads, key/value heads. Odd lengths exclude divisibility optimisations."""
DTYPES = {2: torch.bfloat16, 4: torch.float32}
"""Dtype, by its size in bytes."""
SHAPES = [
    (dtype, features, masked)
    for dtype in DTYPES.values()
    for features, masked in ((64, False), (64, True), (80, True), (128, True), (256, True))
]
"""Dtype, head size, whether there is a mask. Masked kernels need more memory; unmasked is compiled once per dtype."""


class PretendedGPU:
    """A fake Triton driver with the methods that compilation calls."""

    def get_current_target(self) -> GPUTarget:
        """Return the target of an H100."""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """Return 0, the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return a dummy stream."""
        return 0


def mixture(dtype: torch.dtype, features: int, masked: bool) -> None:
    """Compile `mixture`'s kernels for a sequence, forward and backward."""
    heads = [torch.zeros(1, n, TOKENS, features, dtype=dtype, requires_grad=True) for n in (HEADS, GROUPS, GROUPS)]
    chosen = torch.ones(1, TOKENS, HEADS, dtype=torch.bool)
    mask = torch.ones(1, TOKENS, TOKENS, dtype=torch.bool) if masked else None
    output = attend_selected(*heads, chosen, mask, 0.1, True)
    torch.autograd.grad(output, heads, torch.zeros_like(output))


def token(dtype: torch.dtype, features: int, masked: bool) -> None:
    """Compile `mixture`'s decoding kernel for a single token."""
    query, past = torch.zeros(1, HEADS, 1, features, dtype=dtype), (1, GROUPS, PAST, features)
    key, value = torch.zeros(past, dtype=dtype), torch.zeros(past, dtype=dtype)
    mask = torch.ones(1, 1, PAST, dtype=torch.bool) if masked else None
    decode_selected(query, key, value, torch.ones(1, 1, HEADS, dtype=torch.bool), mask, 0.1)


def talking(heads: int, own: bool, size: int, masked: bool) -> None:
    """Compile `talking`'s forward kernel for a sequence; `own`: dynamic maps per query and per key."""
    query, key, value = (torch.zeros(1, heads, TOKENS, 128, dtype=DTYPES[size]) for _ in range(3))
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool) if masked else None
    maps = torch.zeros(1, TOKENS if own else 1, heads, heads)
    key_maps = maps if own else None
    call = TalkingCall(query, key, value, maps, key_maps, maps, key_maps, mask, 0.1, True)
    if not fits(call):
        raise ValueError(f"no tile fits {heads} heads with own={own} of {size} bytes")
    attend_in_tiles(call)


CALLS: dict[str, tuple[Callable[..., None], list[tuple[Any, ...]]]] = {
    "mixture": (mixture, SHAPES),
    "token": (token, SHAPES),
    "talking": (talking, [(*tile, True) for tile in TILES] + [(16, False, 2, False), (32, False, 4, False)]),
}


def main(name: str) -> None:
    """Compile all kernels that the calls of one entry of CALLS launch, without running them."""
    driver.set_active(PretendedGPU())
    run, (call, shapes) = JITFunction.run, CALLS[name]
    shape: tuple[Any, ...] = ()

    def compiled(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        facts = {"kernel": self.fn.__name__, "shape": str(shape), "shared": kernel.metadata.shared}
        print(json.dumps(facts | {"binary": len(kernel.asm["cubin"])}), flush=True)
        return kernel

    JITFunction.run = compiled
    for shape in shapes:
        call(*shape)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in CALLS:
        raise SystemExit(__doc__)
    main(sys.argv[1])
