"""Random calls of the registered attention functions, compared with plain attention in float64: outputs and gradients.

Decoding functions run without gradients, so only their outputs are compared.
"""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from crosshead.modeling.mechanisms.talking import HeadMaps
from crosshead.modeling.ops import repeat_heads

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Maximum relative error (norm of the difference / norm of the reference), per dtype."""
SCALING = 0.2
FURTHER = 12
"""Maximum cache length in single-token decoding, as a multiple of the longest text."""
TRITON = "_triton"
"""Suffix of the names of attention functions that are Triton kernels."""
Call = Callable[..., torch.Tensor]
Checked = tuple[Call, Call, list[torch.Tensor]]
"""The function under test, the plain reference, and the inputs of both (with gradients)."""


def uses_triton(x: torch.Tensor) -> bool:
    """Whether a tensor is on a GPU, where the Triton kernels are used."""
    return x.device.type == "cuda"


def attend(
    name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **options: Any
) -> torch.Tensor:
    """Return the output of a registered attention function; on a GPU, of its Triton kernel if it has one."""
    if uses_triton(query) and name + TRITON in ALL_ATTENTION_FUNCTIONS.valid_keys():
        name += TRITON
    layer = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], is_causal=True, training=False)
    output: torch.Tensor = ALL_ATTENTION_FUNCTIONS[name](layer, query, key, value, mask, scaling=SCALING, **options)[0]
    return output


def a_mask(sizes: tuple[int, int], length: int, device: str) -> torch.Tensor | None:
    """Return None (causal) or a random padding, window or document mask (B, 1, T, T); each token attends to itself."""
    causal = torch.ones(*sizes, length, dtype=torch.bool, device=device).tril()[:, None]
    positions, kind = torch.arange(length, device=device), random.choice(("causal", "padded", "window", "documents"))
    if kind == "causal":
        return None
    if kind == "window":
        return causal.triu(-random.randint(1, length))
    if kind == "padded":
        real = positions >= torch.randint(0, length, (sizes[0], 1), device=device)
        real = real if random.random() < 0.5 else real.flip(1)
        return causal & (real[:, None, None, :] | (positions[:, None] == positions))
    document = (torch.rand(sizes[0], length, device=device) < 4 / length).cumsum(-1)
    return causal & (document[:, None, :, None] == document[:, None, None, :])


def drawn(device: str, longest: int) -> tuple[list[torch.Tensor], torch.Tensor | None, torch.Tensor]:
    """Return random q, k and v in float64, a mask or None, and the allowed keys per query as a boolean mask."""
    batch, groups, length = random.randint(1, 2), random.randint(1, 4), random.choice((1, random.randint(2, longest)))
    heads, size = groups * random.choice((1, 2, 4)), random.choice((20, 64, 128))
    shapes = ((batch, heads, length, size), (batch, groups, length, size), (batch, groups, length, size))
    inputs = [torch.randn(shape, dtype=torch.float64, device=device) for shape in shapes]
    mask = a_mask((batch, length), length, device)
    causal = torch.ones(batch, 1, length, length, dtype=torch.bool, device=device).tril()
    return inputs, mask, causal if mask is None else mask


def a_mixture(device: str, longest: int) -> Checked:
    """Return a `mixture` case with random routing; some heads get no tokens, others all."""
    inputs, mask, allowed = drawn(device, longest)
    batch, heads, length, _ = inputs[0].shape
    shares = torch.tensor(random.choices((0.0, 0.5, 0.75, 1.0), k=heads), device=device)
    chosen = torch.rand(batch, length, heads, device=device) < shares
    routing = {"gates": chosen.float(), "shared_heads": 0, "active_heads": max(1, heads // 2)}

    def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        logits = SCALING * query @ repeat_heads(key, heads).transpose(2, 3)
        weights = logits.masked_fill(~allowed, -torch.inf).softmax(-1)
        return (weights @ repeat_heads(value, heads)).transpose(1, 2) * chosen[..., None]

    def ours(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend("crosshead_mixture", query, key, value, mask, **routing) * chosen[..., None]

    return ours, plain, inputs


def a_mixture_token(device: str, longest: int) -> Checked:
    """Return a `mixture` case of single-token decoding, with random left padding and without gradients."""
    batch, groups, length = random.randint(1, 2), random.randint(1, 8), random.randint(1, FURTHER * longest)
    heads, size = groups * random.choice((1, 2, 4, 17)), random.choice((64, 80, 128, 256))
    shapes = ((batch, heads, 1, size), (batch, groups, length, size), (batch, groups, length, size))
    inputs = [torch.randn(shape, dtype=torch.float64, device=device) for shape in shapes]
    allowed = torch.arange(length, device=device) >= random.randrange(length)
    mask = random.choice((None, allowed.expand(batch, 1, 1, length)))
    chosen = torch.rand(batch, 1, heads, device=device) < random.choice((0.1, 0.5))
    routing = {"gates": chosen.float(), "shared_heads": 0, "active_heads": max(1, heads // 2)}

    def ours(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return attend("crosshead_mixture", query, key, value, mask, **routing) * chosen[..., None]

    def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        logits = SCALING * query @ repeat_heads(key, heads).transpose(2, 3)
        weights = (logits if mask is None else logits.masked_fill(~mask, -torch.inf)).softmax(-1)
        return (weights @ repeat_heads(value, heads)).transpose(1, 2) * chosen[..., None]

    return ours, plain, inputs


def a_talking(device: str, longest: int) -> Checked:
    """Return a `talking` case: static or dynamic head maps, and as many, fewer or more softmax heads than heads."""
    inputs, mask, allowed = drawn(device, longest)
    batch, heads, length, _ = inputs[0].shape
    softmaxes, own = random.choice((heads, 1, heads + 1)), random.random() < 0.5
    of_queries, sizes = (batch, length) if own else (1, 1), ((softmaxes, heads), (heads, softmaxes))
    maps = [torch.randn(*of_queries, *size, device=device) / heads for size in sizes]
    key_maps = [torch.randn(batch, length, *size, device=device) / heads if own else None for size in sizes]
    head_maps = maps[0], key_maps[0], maps[1], key_maps[1]
    added = torch.zeros(allowed.shape, dtype=torch.float64, device=device)
    if mask is not None and random.random() < 0.3:
        added = torch.randn(allowed.shape, device=device)
        mask = added.masked_fill(~allowed, torch.finfo(added.dtype).min)

    def mixed(x: torch.Tensor, stage: int) -> torch.Tensor:
        result = torch.einsum("btij,bjts->bits", maps[stage].to(x.dtype).expand(batch, length, -1, -1), x)
        key_map = key_maps[stage]
        return result if key_map is None else result + torch.einsum("bsij,bjts->bits", key_map.to(x.dtype), x)

    def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        logits = mixed(SCALING * query @ repeat_heads(key, heads).transpose(2, 3), 0) + added
        weights = mixed(logits.masked_fill(~allowed, -torch.inf).softmax(-1), 1)
        return (weights @ repeat_heads(value, heads)).transpose(1, 2)

    def ours(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend("crosshead_talking", query, key, value, mask, head_maps=HeadMaps(*head_maps))

    return ours, plain, inputs


def an_explicit(device: str, longest: int) -> Checked:
    """Return an `explicit` case: one or two tokens attend to cached component heads, with random left padding."""
    batch, groups, tokens = random.randint(1, 2), random.choice((1, 1, 2)), random.randint(1, 2)
    combined, shared, size = random.randint(1, 8 // groups), random.choice((1, 2, 4)), random.choice((64, 128))
    components, heads = groups * random.randint(1, combined), groups * combined * shared
    length = random.randint(tokens, longest)
    shapes = ((batch, heads, tokens, size), (batch, components, length, size), (batch, components, length, size))
    inputs = [torch.randn(shape, dtype=torch.float64, device=device) for shape in shapes]
    scalars = [torch.rand(groups * combined, components // groups, device=device).bfloat16() for _ in range(2)]
    allowed = torch.arange(length, device=device) >= random.randrange(length)
    mask = allowed.expand(batch, 1, tokens, length)

    def ours(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        key_scalars, value_scalars = (scalar.to(query.dtype) for scalar in scalars)
        options = {"key_map": key_scalars, "value_map": value_scalars, "implementation": "sdpa"}
        return attend("crosshead_explicit", query, key, value, mask, **options)

    def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        key_scalars, value_scalars = (torch.block_diag(*scalar.double().chunk(groups)) for scalar in scalars)
        keys, values = (
            torch.einsum("ij,bjsd->bisd", scalar, x) for scalar, x in ((key_scalars, key), (value_scalars, value))
        )
        logits = SCALING * query @ repeat_heads(keys, heads).transpose(2, 3)
        weights = logits.masked_fill(~allowed, -torch.inf).softmax(-1)
        return (weights @ repeat_heads(values, heads)).transpose(1, 2)

    return ours, plain, inputs


def error(checked: Checked, dtype: torch.dtype, gradients: bool) -> float:
    """Return the largest relative error of the output and, if `gradients`, of the input gradients."""
    ours, plain, exact = checked
    inputs = [x.to(dtype).requires_grad_() for x in exact]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    output, expected = ours(*inputs), plain(*exact)
    direction = torch.randn_like(expected).to(dtype)
    pairs = [(output, expected)]
    if gradients:
        expected_gradients = torch.autograd.grad(expected, exact, direction.double())
        pairs += zip(torch.autograd.grad(output, inputs, direction), expected_gradients, strict=True)
    margin = 0.01 * direction.double().norm()  # some gradients are zero except for rounding
    return max(((mine - theirs).norm() / (theirs.norm() + margin)).item() for mine, theirs in pairs)


MAKERS: dict[str, Callable[[str, int], Checked]] = {
    "mixture": a_mixture,
    "mixture-token": a_mixture_token,
    "talking": a_talking,
    "explicit": an_explicit,
}


def check(
    mechanism: str, dtype: torch.dtype, device: str, longest: int, calls: int, seed: int = 0
) -> tuple[float, bool]:
    """Return the largest error of random calls, and whether it is within the tolerance."""
    random.seed(seed)
    torch.manual_seed(seed)
    make = MAKERS[mechanism]
    errors = [error(make(device, longest), dtype, make is not a_mixture_token) for _ in range(calls)]
    worst = max(errors) if all(x == x for x in errors) else float("nan")
    return worst, worst < TOLERANCES[dtype]
