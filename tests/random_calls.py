"""Random calls of what has a fast way on a GPU, beside the plain computation in float64: outputs and gradients.

What decodes without gradients has none to compare.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

from crosshead.modeling.ops import repeat_heads
from crosshead.modeling.explicit_decode import Components, attend_to_components
from crosshead.modeling.mechanisms.base import AttentionCall
from crosshead.modeling.routed_attention import routed_attention
from crosshead.modeling.routed_decode import attend_to_needed
from crosshead.modeling.talking_operator import talking_attention

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Of the norm of what differs, beside the norm of what is wanted."""
SCALING = 0.2
FURTHER = 50
"""How much longer than a text the past of a single token may be."""
Call = Callable[..., torch.Tensor]
Checked = tuple[Call, Call, list[torch.Tensor]]
"""Ours and the plain computation, and the inputs of both that have gradients."""


def a_mask(sizes: tuple[int, int], length: int, device: str) -> torch.Tensor | None:
    """None for causal, padding on either side, a window or documents: (B, 1, T, T), and every token sees itself."""
    causal = torch.ones(*sizes, length, dtype=torch.bool, device=device).tril()[:, None]
    places, kind = torch.arange(length, device=device), random.choice(("causal", "padded", "window", "documents"))
    if kind == "causal":
        return None
    if kind == "window":
        return causal.triu(-random.randint(1, length))
    if kind == "padded":
        real = places >= torch.randint(0, length, (sizes[0], 1), device=device)
        real = real if random.random() < 0.5 else real.flip(1)
        return causal & (real[:, None, None, :] | (places[:, None] == places))
    document = (torch.rand(sizes[0], length, device=device) < 4 / length).cumsum(-1)
    return causal & (document[:, None, :, None] == document[:, None, None, :])


def drawn(device: str, longest: int) -> tuple[list[torch.Tensor], torch.Tensor | None, torch.Tensor]:
    """Query, key and value in float64, a mask, and which keys each query sees."""
    batch, groups, length = random.randint(1, 2), random.randint(1, 4), random.choice((1, random.randint(2, longest)))
    heads, size = groups * random.choice((1, 2, 4)), random.choice((20, 64, 128))
    shapes = ((batch, heads, length, size), (batch, groups, length, size), (batch, groups, length, size))
    inputs = [torch.randn(shape, dtype=torch.float64, device=device) for shape in shapes]
    mask = a_mask((batch, length), length, device)
    causal = torch.ones(batch, 1, length, length, dtype=torch.bool, device=device).tril()
    return inputs, mask, causal if mask is None else mask


def a_mixture(device: str, longest: int) -> Checked:
    """Attention of chosen queries; to some heads nothing is routed, to others everything."""
    inputs, mask, seen = drawn(device, longest)
    batch, heads, length, _ = inputs[0].shape
    shares = torch.tensor(random.choices((0.0, 0.5, 0.75, 1.0), k=heads), device=device)
    chosen = torch.rand(batch, length, heads, device=device) < shares
    call = AttentionCall(_unused, False, mask, SCALING, 0.0, plain=True)

    def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        logits = SCALING * query @ repeat_heads(key, heads).transpose(2, 3)
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        return (weights @ repeat_heads(value, heads)).transpose(1, 2) * chosen[..., None]

    return lambda q, k, v: routed_attention(q, k, v, chosen, 0, call), plain, inputs


def a_mixture_token(device: str, longest: int) -> Checked:
    """One query for each head, of which some count, after keys of which the first may be padding; no gradients."""
    batch, groups, length = random.randint(1, 2), random.randint(1, 8), random.randint(1, FURTHER * longest)
    heads, size = groups * random.choice((1, 2, 4, 17)), random.choice((64, 80, 128, 256))
    shapes = ((batch, heads, 1, size), (batch, groups, length, size), (batch, groups, length, size))
    inputs = [torch.randn(shape, dtype=torch.float64, device=device) for shape in shapes]
    seen = torch.arange(length, device=device) >= random.randrange(length)
    mask = random.choice((None, seen.expand(batch, 1, 1, length)))
    chosen = torch.rand(batch, 1, heads, device=device) < random.choice((0.1, 0.5))
    call = AttentionCall(_unused, False, mask, SCALING, 0.0, plain=True)

    def ours(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found = attend_to_needed(query, key, value, chosen, call)
        if found is None:  # where Triton does not run, and most heads are needed
            raise NotImplementedError("the kernels were not asked for")
        return found * chosen[..., None]

    def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        logits = SCALING * query @ repeat_heads(key, heads).transpose(2, 3)
        weights = (logits if mask is None else logits.masked_fill(~mask, -torch.inf)).softmax(-1)
        return (weights @ repeat_heads(value, heads)).transpose(1, 2) * chosen[..., None]

    return ours, plain, inputs


def a_talking(device: str, longest: int) -> Checked:
    """Attention with mixed heads, some with maps of each query and key, some with other counts of softmaxes."""
    inputs, mask, seen = drawn(device, longest)
    batch, heads, length, _ = inputs[0].shape
    softmaxes, own = random.choice((heads, 1, heads + 1)), random.random() < 0.5
    of_queries, sizes = (batch, length) if own else (1, 1), ((softmaxes, heads), (heads, softmaxes))
    maps = [torch.randn(*of_queries, *size, device=device) / heads for size in sizes]
    more = [torch.randn(batch, length, *size, device=device) / heads if own else None for size in sizes]
    added = torch.zeros(seen.shape, dtype=torch.float64, device=device)
    if mask is not None and random.random() < 0.3:
        added = torch.randn(seen.shape, device=device)
        mask = added.masked_fill(~seen, torch.finfo(added.dtype).min)

    def mixed(x: torch.Tensor, stage: int) -> torch.Tensor:
        found = torch.einsum("btij,bjts->bits", maps[stage].to(x.dtype).expand(batch, length, -1, -1), x)
        of_keys = more[stage]
        return found if of_keys is None else found + torch.einsum("bsij,bjts->bits", of_keys.to(x.dtype), x)

    def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        logits = mixed(SCALING * query @ repeat_heads(key, heads).transpose(2, 3), 0) + added
        weights = mixed(logits.masked_fill(~seen, -torch.inf).softmax(-1), 1)
        return (weights @ repeat_heads(value, heads)).transpose(1, 2)

    def ours(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return talking_attention(query, key, value, maps[0], more[0], maps[1], more[1], mask, SCALING, True)

    return ours, plain, inputs


def an_explicit(device: str, longest: int) -> Checked:
    """A token or two that meet components as a cache holds them; some of the first keys may be padding."""
    batch, groups, tokens = random.randint(1, 2), random.randint(1, 8), random.randint(1, 2)
    heads, rows, size = random.randint(1, groups), tokens * random.choice((1, 2, 4)), random.choice((64, 128))
    length = random.randint(tokens, longest)
    shapes = ((batch, groups, rows, size), (batch, heads, length, size), (batch, heads, length, size))
    inputs = [torch.randn(shape, dtype=torch.float64, device=device) for shape in shapes]
    scalars = [torch.rand(groups, heads, device=device).bfloat16() for _ in range(2)]
    seen = torch.arange(length, device=device) >= random.randrange(length)
    mask = seen.expand(batch, 1, tokens, length)

    def ours(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        sides = (Components(x, some.to(x.dtype)) for x, some in zip((key, value), scalars, strict=True))
        return attend_to_components(SCALING * query, *sides, None, mask)

    def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        of_keys, of_values = (some.double() for some in scalars)
        logits = SCALING * query @ torch.einsum("ij,bjsd->bids", of_keys, key)
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        return weights @ torch.einsum("ij,bjsd->bisd", of_values, value)

    return ours, plain, inputs


def _unused(*_: torch.Tensor) -> Any:
    raise NotImplementedError


def error(checked: Checked, dtype: torch.dtype, gradients: bool) -> float:
    """The greatest relative error of the outputs and, where wanted, of a gradient."""
    ours, plain, exact = checked
    inputs = [x.to(dtype).requires_grad_() for x in exact]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    found, expected = ours(*inputs), plain(*exact)
    given = torch.randn_like(expected).to(dtype)
    pairs = [(found, expected)]
    if gradients:
        wanted = torch.autograd.grad(expected, exact, given.double())
        pairs += zip(torch.autograd.grad(found, inputs, given), wanted, strict=True)
    least = 0.01 * given.double().norm()  # some gradients are zero, but for rounding
    return max(((mine - theirs).norm() / (theirs.norm() + least)).item() for mine, theirs in pairs)


MAKERS: dict[str, Callable[[str, int], Checked]] = {
    "mixture": a_mixture,
    "mixture-token": a_mixture_token,
    "talking": a_talking,
    "explicit": an_explicit,
}


def checks(device: str, longest: int, calls: int) -> Iterator[tuple[str, float, bool]]:
    """The worst error of each mechanism and dtype, and whether that is too great."""
    for mechanism, make in MAKERS.items():
        for dtype, tolerance in TOLERANCES.items():
            random.seed(0)
            torch.manual_seed(0)
            errors = [error(make(device, longest), dtype, make is not a_mixture_token) for _ in range(calls)]
            worst = max(errors) if all(x == x for x in errors) else float("nan")
            yield f"{mechanism} {str(dtype).removeprefix('torch.')}", worst, worst < tolerance
