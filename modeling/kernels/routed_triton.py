"""Flash attention for `mixture` in Triton, forward and backward: each head attends only from its selected queries.

Scores and weights stay on the chip; the backward pass recomputes them from one log-sum-exp per query. The number of
selected queries stays on the GPU, without host synchronisation: the grid covers all T queries, and programs past the
end of a head's list return at once. Autograd and torch.compile see one custom op.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

try:  # transformers does not count an import inside `try` among a file's required packages
    import triton
    import triton.language as tl
except ImportError:
    raise

from .key_spans_triton import key_spans
from .routed_gradients_triton import key_gradients, query_gradients
from .routed_kernels_triton import attend, list_tokens
from .triton_support import product_precision

NAMESPACE = "crosshead_mixture_triton"
MAX_TOKENS = 4096
"""Maximum number of tokens that one program reads per iteration when it scans all tokens of a head or a sequence."""
OPERAND_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""Dtype of the matmul operands, per dtype of q, k and v."""


@dataclass(frozen=True)
class Tile:
    """Number of queries and keys per tile, and number of warps per program."""

    queries: int
    keys: int
    warps: int


TILES = {
    64: (Tile(128, 64, 4), Tile(64, 64, 4)),
    128: (Tile(128, 64, 8), Tile(64, 64, 8)),
    256: (Tile(64, 32, 4), Tile(32, 32, 4)),
}
"""Maximum head size -> tiles of the forward and the backward pass in half precision, for an H100."""


def tiles_of(features: int, dtype: torch.dtype) -> tuple[Tile, Tile]:
    """Return the tiles of the forward and the backward pass for a head size; smaller ones in float32."""
    forward, backward = TILES[min((size for size in TILES if size >= features), default=max(TILES))]
    if dtype == torch.float32:
        small = [Tile(min(tile.queries, 64) // 2, tile.keys // 2, tile.warps) for tile in (forward, backward)]
        return small[0], small[1]
    return forward, backward


@dataclass(frozen=True)
class RoutedCall:
    """Converts a call to kernel arguments: queries (B, H, T, d), keys and values (B, G, S, d), mask (B or 1, T, S)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    scaling: float
    causal: bool

    @cached_property
    def qkv(self) -> list[torch.Tensor]:
        """Queries, keys and values with contiguous features (stride 1)."""
        return [x if x.stride(3) == 1 else x.contiguous() for x in (self.query, self.key, self.value)]

    @property
    def features(self) -> tuple[int, int]:
        """Head size of queries and keys, and head size of values."""
        return self.query.shape[3], self.value.shape[3]

    def tiles(self) -> tuple[Tile, Tile]:
        """Return the tiles of the forward and the backward pass."""
        return tiles_of(max(self.features), self.query.dtype)

    def spans(self) -> torch.Tensor:
        """Return `key_spans` of the mask, (3, B, 1, T); an empty tensor without a mask."""
        if self.mask is None:
            return torch.empty(0, dtype=torch.int32, device=self.query.device)
        return key_spans(self.mask.expand(self.query.shape[0], -1, -1).unsqueeze(1))

    def shared_arguments(self, spans: torch.Tensor, tile: Tile) -> tuple[Any, ...]:
        """Return the trailing kernel arguments, from `mask` on, which `attend` and both gradient kernels share."""
        (batch, heads, queries, _), groups, keys = self.query.shape, self.key.shape[1], self.key.shape[2]
        mask, strides = spans, [stride for x in self.qkv for stride in x.stride()[:3]]
        if self.mask is None:  # `spans` stands in as the pointer; no kernel reads it
            strides += (0, 0)
        else:
            mask = self.mask if self.mask.stride(2) == 1 else self.mask.contiguous()
            strides += mask.expand(batch, -1, -1).stride()[:2]
        sizes = (queries, keys, heads, groups, batch * queries, self.scaling, self.mask is not None, self.causal)
        padded = (max(16, triton.next_power_of_2(size)) for size in self.features)
        dtype = self.query.dtype
        formats = OPERAND_DTYPES[dtype], product_precision(dtype)
        return (mask, *strides, *sizes, *self.features, *padded, tile.queries, tile.keys, *formats)


def attend_selected(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    chosen: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    causal: bool,
) -> torch.Tensor:
    """Return outputs (B, T, H, d), zero where `chosen` (B, T, H) is False, under autocast in its dtype.

    The mask is (B or 1, T, S), True where a key is visible.
    """
    device = value.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    qkv = [x.to(dtype) for x in (query, key, value)]
    return routed(*qkv, chosen, mask, scaling, causal)[0]


@torch.library.custom_op(f"{NAMESPACE}::attend", mutates_args=())
def routed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    chosen: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    causal: bool,
) -> list[torch.Tensor]:
    """Return outputs (B, T, H, d); for the backward pass also log-sum-exp, `tokens`, `offsets` and `spans`."""
    call = RoutedCall(query, key, value, mask, scaling, causal)
    (batch, heads, queries, _), device = query.shape, query.device
    output = value.new_zeros(batch, queries, heads, value.shape[3])
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=device)
    tokens = torch.empty(batch, heads, queries, dtype=torch.int32, device=device)
    offsets = torch.empty(batch, heads, queries + 1, dtype=torch.int32, device=device)
    with torch.cuda.device_of(query):  # kernels launch on the current device
        spans, tile = call.spans(), call.tiles()[0]
        lists, sizes = (tokens, offsets, spans), (queries, heads, batch * queries)
        list_tokens[(batch * heads,)](
            chosen.contiguous(), spans, tokens, offsets, *sizes, mask is not None, _scan_block(queries)
        )
        grid = (triton.cdiv(queries, tile.queries), batch * heads)
        attend[grid](*call.qkv, output, lse, *lists, *call.shared_arguments(spans, tile), num_warps=tile.warps)
    return [output, lse, *lists]


@torch.library.custom_op(f"{NAMESPACE}::gradients", mutates_args=())
def _gradients(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    output: torch.Tensor,
    lse: torch.Tensor,
    tokens: torch.Tensor,
    offsets: torch.Tensor,
    spans: torch.Tensor,
    scaling: float,
    causal: bool,
) -> list[torch.Tensor]:
    """Return the gradients of queries, keys and values, from the gradient of the outputs (B, T, H, d)."""
    call = RoutedCall(query, key, value, mask, scaling, causal)
    (batch, heads, queries, size), (_, groups, keys, _) = query.shape, key.shape
    grad_output, deltas, tile = grad_output.contiguous(), torch.empty_like(lse), call.tiles()[1]
    grad_query = query.new_zeros(batch, queries, heads, size)
    grad_key, grad_value = key.new_empty(key.shape), value.new_empty(value.shape)
    lists, shared = (tokens, offsets, spans), call.shared_arguments(spans, tile)
    with torch.cuda.device_of(query):
        grid = (triton.cdiv(queries, tile.queries), batch * heads)
        tensors = (*call.qkv, output, lse, grad_output, deltas, grad_query)
        query_gradients[grid](*tensors, *lists, *shared, num_warps=tile.warps)
        grid = (triton.cdiv(keys, tile.keys), batch * groups)
        tensors = (*call.qkv, lse, grad_output, deltas, grad_key, grad_value)
        key_gradients[grid](*tensors, *lists, *shared, _scan_block(queries), num_warps=tile.warps)
    return [grad_query.transpose(1, 2), grad_key, grad_value]


def _scan_block(tokens: int) -> int:
    """Return the number of tokens per iteration of a scan over all tokens, a power of two."""
    return min(MAX_TOKENS, triton.next_power_of_2(tokens))


@routed.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chosen: torch.Tensor, *rest: Any) -> Any:
    batch, heads, queries, _ = query.shape
    return [
        value.new_empty(batch, queries, heads, value.shape[3]),
        query.new_empty(batch, heads, queries, dtype=torch.float32),
        query.new_empty(batch, heads, queries, dtype=torch.int32),
        query.new_empty(batch, heads, queries + 1, dtype=torch.int32),
        query.new_empty((0,) if rest[0] is None else (3, batch, 1, queries), dtype=torch.int32),
    ]


@_gradients.register_fake
def _(grad_output: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> Any:
    batch, heads, queries, size = query.shape
    grad_query = query.new_empty(batch, queries, heads, size).transpose(1, 2)
    return [grad_query, key.new_empty(key.shape), value.new_empty(value.shape)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    query, key, value, _, mask, ctx.scaling, ctx.causal = inputs
    ctx.save_for_backward(query, key, value, mask, *output)
    ctx.set_materialize_grads(False)  # no zero gradients for outputs that only the backward pass reads


def _backward(ctx: Any, grads: list[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    return (*_gradients(grads[0], *ctx.saved_tensors, ctx.scaling, ctx.causal), None, None, None, None)


routed.register_autograd(_backward, setup_context=_setup_context)
