"""Cases for sparse attention of routed queries: random masks and routes, a plain reference, and models."""

import random
from collections.abc import Callable
from typing import Any

import torch

from oracle_layers import OPTION_CASES
from toys import tokens

Sizes = tuple[int, int, int]
"""Batch size, queries per sequence, keys per sequence."""
MIXTURES = {name: mixers for name, mixers in OPTION_CASES.items() if "mixture" in mixers}
MIXTURES["mixture before differential"] = {"mixture": {"shared_heads": 0, "active_heads": 1}, "differential": {}}
MIXTURES["explicit and mixture"] = {
    "explicit": {"norm": False, "key_heads": 1, "value_heads": 1},
    "mixture": {"shared_heads": 1, "active_heads": 2},
}
SKIPPING = {"mixture": {"shared_heads": 1, "active_heads": 2}}
SCALING = 0.4


def lower(sizes: Sizes) -> torch.Tensor:
    """Return a causal mask (B, T, S), aligned so that the last query attends to the last key."""
    return torch.ones(sizes, dtype=torch.bool).tril(sizes[2] - sizes[1])


def padded(sizes: Sizes, left: bool) -> torch.Tensor:
    """Return a causal mask with random padding; a left-padded sequence may be empty, a right-padded one is not."""
    real = torch.arange(sizes[2]) < torch.randint(0 if left else 1, sizes[2] + 1, (sizes[0], 1))
    return lower(sizes) & (real.flip(1) if left else real)[:, None, :]


def documents(sizes: Sizes) -> torch.Tensor:
    """Return a causal mask for packed documents: a token attends to its own document only."""
    document = (torch.rand(sizes[0], sizes[2]) < 0.2).cumsum(-1)
    return lower(sizes) & (document[:, -sizes[1] :, None] == document[:, None, :])


def window(sizes: Sizes) -> torch.Tensor:
    """Return a causal sliding-window mask of random width."""
    return lower(sizes).triu(sizes[2] - sizes[1] - random.randint(0, 9))


MASKS: dict[str, Callable[[Sizes], torch.Tensor] | None] = {
    "causal": None,
    "all": None,
    "padded left": lambda sizes: padded(sizes, True),
    "padded right": lambda sizes: padded(sizes, False),
    "documents": documents,
    "window": window,
    "scattered": lambda sizes: torch.rand(sizes) < random.choice((0.02, 0.5)),  # some queries have no key
}


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: torch.Tensor, allowed: torch.Tensor
) -> torch.Tensor:
    """Return dense attention (B, T, H, d), zeroed where a head was not chosen or the query has no visible key."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    logits = (SCALING * q @ k.transpose(2, 3)).masked_fill(~allowed[:, None], torch.finfo(q.dtype).min)
    counts = chosen & allowed.any(-1, keepdim=True)
    return (logits.softmax(-1) @ v).transpose(1, 2) * counts[..., None]


def routes(sizes: Sizes, heads: int, shared: int = 0) -> torch.Tensor:
    """Return random routes (B, T, H): heads get no, some or all tokens; the first `shared` heads get all."""
    share = torch.tensor(random.choices((0.0, 0.1, 0.5, 1.0), k=heads))
    share[:shared] = 1.0
    return torch.rand(sizes[0], sizes[1], heads) < share


def allowed_keys(kind: str, sizes: Sizes, mask: torch.Tensor | None) -> torch.Tensor:
    """Return which keys each query may attend to (B, T, S), given a mask of MASKS or None."""
    if mask is not None:
        return mask.expand(sizes)
    return torch.ones(sizes, dtype=torch.bool) if kind == "all" else lower(sizes)


def check(
    output: torch.Tensor, inputs: list[torch.Tensor], chosen: torch.Tensor, allowed: torch.Tensor, tolerance: float
) -> None:
    """Compare an output and its gradients with the plain reference in float64."""
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = plain(*exact, chosen, allowed)
    direction = torch.randn_like(expected).to(output.dtype)
    ours = torch.autograd.grad(output, inputs, direction)
    truth = torch.autograd.grad(expected, exact, direction.double())
    for mine, theirs in zip((output, *ours), (expected, *truth), strict=True):
        assert mine.dtype == output.dtype
        assert (mine - theirs).abs().max() <= tolerance * max(1.0, theirs.abs().max().item())


PADDING = torch.tensor([[1] * 12, [0] * 3 + [1] * 9])
INPUTS: dict[str, dict[str, Any]] = {
    "causal": {},
    "padded left": {"attention_mask": PADDING},
    "padded right": {"attention_mask": PADDING.flip(1)},
    "packed": {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]]).expand(2, -1)},
}
"""Model arguments beside the ids, from which transformers makes the attention masks."""
WINDOW = {"sliding_window": 4, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}


def logits_and_gradients(model: Any, kind: str) -> list[torch.Tensor]:
    """Return the logits of the non-padding tokens for one entry of INPUTS, and all parameter gradients."""
    real = INPUTS[kind].get("attention_mask", torch.ones(2, 12)).bool()
    logits = model(tokens(2, 12), use_cache=False, **INPUTS[kind]).logits[real]
    return [logits.detach(), *torch.autograd.grad(logits.square().mean(), [*model.parameters()])]


@torch.no_grad()
def logits_in_parts(model: Any, ids: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """Return the logits of a text that is fed in parts of the given sizes, with a cache."""
    cache, logits = None, []
    for part in ids.split(sizes, dim=1):
        output = model(part, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits)
    return torch.cat(logits, dim=1)
