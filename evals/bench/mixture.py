"""`mixture`'s attention, which leaves out what does not count, beside all of it.

Both have the same inputs; routes are drawn at random, which is how a router starts.
"""

from functools import partial

import torch

from crosshead.modeling.mechanisms.base import AttentionState, HeadLayout
from crosshead.modeling.mechanisms.mixture import mixture_attention_forward

from .attention import SEED, attention, dense, implementation, in_one_layer, mixed
from .case import Case
from .pairs import Run

HEADS = {"heads": 16, "head_dim": 64}
DENSE = "torch's fastest dense causal attention on the same queries, keys and values"


def routed(
    ours: bool,
    tokens: int,
    heads: int,
    head_dim: int,
    active: int,
    shared: int,
    gradients: bool = False,
    padded: bool = False,
    published: bool = False,
) -> Run:
    """Attention of the queries that are routed to, or of all; where padded, the first keys are not to be seen.

    `published` takes the function that a published model brings, which runs where crosshead is not installed.
    """
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril() if padded else None
    if mask is not None:
        mask[..., : tokens // 16] = False
    if not ours:
        return attention(partial(dense, mask=mask), tokens, heads, head_dim, gradients)
    options = {"active_heads": active, "shared_heads": shared, "router": "query_norm"}
    mixture = in_one_layer("mixture", options, HeadLayout(heads * head_dim, heads, heads, head_dim))
    gates = routes(tokens, heads, active, shared)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        state = AttentionState(query, key, query, key, value, gates=gates)
        if published:
            return mixed(mixture, state, mask, function=mixture_attention_forward)
        return mixed(mixture, state, mask, implementation("mixture", query.device))

    return attention(attend, tokens, heads, head_dim, gradients)


def routes(tokens: int, heads: int, active: int, shared: int) -> torch.Tensor:
    """Gates (1, T, H): 1 for the heads that count for a token, which the first `shared` always do, and 0."""
    torch.manual_seed(SEED)
    drawn = torch.rand(1, tokens, heads)
    drawn[..., :shared] = 2.0
    return torch.zeros_like(drawn).scatter(-1, drawn.topk(active, dim=-1).indices, 1.0)


def _case(
    name: str,
    tokens: int,
    active: int,
    shared: int,
    gradients: bool = False,
    padded: bool = False,
    published: bool = False,
    **targets: float,
) -> Case:
    what = f"{active} of 16 heads active, {shared} of them always, {tokens} tokens{', padded' * padded}, forward"
    what = f"mixture attention{', without crosshead installed' * published}, {what}" + " and backward" * gradients
    shape = HEADS | {"tokens": tokens, "active": active, "shared": shared}
    shape |= {"gradients": gradients, "padded": padded, "published": published}
    return Case(f"mixture-{name}-{tokens}", what, DENSE, routed, shape, targets)


CASES = (
    _case("half", 1024, 8, 4),
    _case("half", 2048, 8, 4, cpu=0.75),
    _case("half", 4096, 8, 4, cpu=0.65, cuda=0.60),
    _case("half", 8192, 8, 4, cuda=0.60),
    _case("half-unshared", 2048, 8, 0, cpu=0.75),
    _case("half-unshared", 4096, 8, 0, cpu=0.65, cuda=0.60),
    _case("half-padded", 2048, 8, 4, padded=True),
    _case("three-quarters", 1024, 12, 6),
    _case("three-quarters", 2048, 12, 6, cpu=0.95, cuda=0.80),
    _case("three-quarters", 4096, 12, 6, cpu=0.95, cuda=0.80),
    _case("gradients", 2048, 8, 4, gradients=True, cpu=0.80, cuda=0.65),
    _case("gradients", 4096, 8, 4, gradients=True, cpu=0.80, cuda=0.65),
    _case("three-quarters-gradients", 2048, 12, 6, gradients=True),
    _case("most", 2048, 14, 7),
    _case("published", 4096, 8, 4, published=True, cpu=1.3, cuda=1.3),
)
