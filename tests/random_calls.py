"""Random calls of the registered attention functions, compared with plain attention in float64.

Outputs and gradients; functions that decode without gradients have none to compare.
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
"""Of the norm of what differs, beside the norm of what is wanted."""
SCALING = 0.2
FURTHER = 12
"""How much longer than a text the past of a single token may be."""
TRITON = "_triton"
"""The ending of names of functions that a GPU runs."""
Call = Callable[..., torch.Tensor]
Checked = tuple[Call, Call, list[torch.Tensor]]
"""Ours and the plain computation, and the inputs of both that have gradients."""


def uses_triton(x: torch.Tensor) -> bool:
    """On a GPU."""
    return x.device.type == "cuda"


def attend(
    name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **options: Any
) -> torch.Tensor:
    """The outputs of a registered function; on a GPU, by Triton where there is one."""
    if uses_triton(query) and name + TRITON in ALL_ATTENTION_FUNCTIONS.valid_keys():
        name += TRITON
    layer = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], is_causal=True, training=False)
    output: torch.Tensor = ALL_ATTENTION_FUNCTIONS[name](layer, query, key, value, mask, scaling=SCALING, **options)[0]
    return output


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
    routing = {"gates": chosen.float(), "shared_heads": 0, "active_heads": max(1, heads // 2)}

    def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        logits = SCALING * query @ repeat_heads(key, heads).transpose(2, 3)
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        return (weights @ repeat_heads(value, heads)).transpose(1, 2) * chosen[..., None]

    def ours(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend("crosshead_mixture", query, key, value, mask, **routing) * chosen[..., None]

    return ours, plain, inputs


def a_mixture_token(device: str, longest: int) -> Checked:
    """One query for each head, of which some count, after keys of which the first may be padding; no gradients."""
    batch, groups, length = random.randint(1, 2), random.randint(1, 8), random.randint(1, FURTHER * longest)
    heads, size = groups * random.choice((1, 2, 4, 17)), random.choice((64, 80, 128, 256))
    shapes = ((batch, heads, 1, size), (batch, groups, length, size), (batch, groups, length, size))
    inputs = [torch.randn(shape, dtype=torch.float64, device=device) for shape in shapes]
    seen = torch.arange(length, device=device) >= random.randrange(length)
    mask = random.choice((None, seen.expand(batch, 1, 1, length)))
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
    """Attention with mixed heads, some with maps of each query and key, some with other counts of softmaxes."""
    inputs, mask, seen = drawn(device, longest)
    batch, heads, length, _ = inputs[0].shape
    softmaxes, own = random.choice((heads, 1, heads + 1)), random.random() < 0.5
    of_queries, sizes = (batch, length) if own else (1, 1), ((softmaxes, heads), (heads, softmaxes))
    maps = [torch.randn(*of_queries, *size, device=device) / heads for size in sizes]
    more = [torch.randn(batch, length, *size, device=device) / heads if own else None for size in sizes]
    head_maps = maps[0], more[0], maps[1], more[1]
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
        return attend("crosshead_talking", query, key, value, mask, head_maps=HeadMaps(*head_maps))

    return ours, plain, inputs


def an_explicit(device: str, longest: int) -> Checked:
    """A token or two that meet components as a cache holds them; some of the first keys may be padding."""
    batch, groups, tokens = random.randint(1, 2), random.choice((1, 1, 2)), random.randint(1, 2)
    most, shared, size = random.randint(1, 8 // groups), random.choice((1, 2, 4)), random.choice((64, 128))
    components, heads = groups * random.randint(1, most), groups * most * shared
    length = random.randint(tokens, longest)
    shapes = ((batch, heads, tokens, size), (batch, components, length, size), (batch, components, length, size))
    inputs = [torch.randn(shape, dtype=torch.float64, device=device) for shape in shapes]
    scalars = [torch.rand(groups * most, components // groups, device=device).bfloat16() for _ in range(2)]
    seen = torch.arange(length, device=device) >= random.randrange(length)
    mask = seen.expand(batch, 1, tokens, length)

    def ours(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        of_keys, of_values = (some.to(query.dtype) for some in scalars)
        options = {"key_map": of_keys, "value_map": of_values, "implementation": "sdpa"}
        return attend("crosshead_explicit", query, key, value, mask, **options)

    def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        of_keys, of_values = (torch.block_diag(*some.double().chunk(groups)) for some in scalars)
        keys, values = (torch.einsum("ij,bjsd->bisd", some, x) for some, x in ((of_keys, key), (of_values, value)))
        logits = SCALING * query @ repeat_heads(keys, heads).transpose(2, 3)
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        return (weights @ repeat_heads(values, heads)).transpose(1, 2)

    return ours, plain, inputs


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


def check(
    mechanism: str, dtype: torch.dtype, device: str, longest: int, calls: int, seed: int = 0
) -> tuple[float, bool]:
    """The worst error of random calls, and whether it is small enough."""
    random.seed(seed)
    torch.manual_seed(seed)
    make = MAKERS[mechanism]
    errors = [error(make(device, longest), dtype, make is not a_mixture_token) for _ in range(calls)]
    worst = max(errors) if all(x == x for x in errors) else float("nan")
    return worst, worst < TOLERANCES[dtype]
