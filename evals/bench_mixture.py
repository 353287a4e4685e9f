"""`mixture`'s attention and projections, which leave out what does not count, beside all of it.

Both have the same inputs; routes are drawn at random, which is how a router starts.
"""

from functools import partial

import torch
from torch import nn

from crosshead.modeling.chosen_projection import ChosenTokens
from crosshead.modeling.mechanisms.base import HeadLayout, HeadStates
from crosshead.modeling.mechanisms.mixture import Mixture

from .bench_attention import SEED, attention, dense, mixed
from .bench_case import Case
from .bench_pairs import Run

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
) -> Run:
    """Attention of the queries that are routed to, or of all; where padded, the first keys are not to be seen."""
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril() if padded else None
    if mask is not None:
        mask[..., : tokens // 16] = False
    if not ours:
        return attention(partial(dense, mask=mask), tokens, heads, head_dim, gradients)
    mixture = router(heads, head_dim, active, shared)
    gates = routes(tokens, heads, active, shared)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return mixed(mixture, HeadStates(query, key, query, key, value, gates=gates), mask)

    return attention(attend, tokens, heads, head_dim, gradients)


def projected(ours: bool, tokens: int, heads: int, head_dim: int, active: int, shared: int, gradients: bool) -> Run:
    """A layer's queries from hidden states, and hidden states from its outputs, which are zero where not routed to."""
    torch.manual_seed(SEED)
    size = heads * head_dim
    into, out = (nn.Linear(size, size, bias=False).requires_grad_(gradients) for _ in range(2))
    chosen = routes(tokens, heads, active, shared) != 0
    hidden, given = torch.randn(2, 1, tokens, size)
    output = torch.randn(1, tokens, heads, head_dim) * chosen.unsqueeze(-1)
    to_queries = given * chosen.repeat_interleave(head_dim, -1)
    inputs = [hidden.requires_grad_(gradients), output.requires_grad_(gradients)]

    @torch.set_grad_enabled(gradients)
    def both() -> list[torch.Tensor]:
        if not ours:
            return [into(hidden), out(output.flatten(2))]
        kept = ChosenTokens(chosen.flatten(0, 1), shared)
        return [kept.project_in(into, hidden), kept.project_out(out, output)]

    def run() -> object:
        found = both()
        return (
            torch.autograd.grad(found, [*inputs, into.weight, out.weight], [to_queries, given]) if gradients else found
        )

    return run


def router(heads: int, head_dim: int, active: int, shared: int) -> Mixture:
    """A layer's."""
    settings = Mixture.complete({"active_heads": active, "shared_heads": shared, "router": "query_norm"})
    return Mixture(HeadLayout(heads * head_dim, heads, heads, head_dim, output_heads=heads), settings)


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
    **targets: float,
) -> Case:
    what = f"{active} of 16 heads active, {shared} of them always, {tokens} tokens{', padded' * padded}, forward"
    what = f"mixture attention, {what}" + " and backward" * gradients
    shape = HEADS | {"tokens": tokens, "active": active, "shared": shared, "gradients": gradients, "padded": padded}
    return Case(f"mixture-{name}-{tokens}", what, DENSE, routed, shape, targets)


def _projections(gradients: bool, active: int) -> Case:
    shape = HEADS | {"tokens": 4096, "active": active, "shared": active // 2, "gradients": gradients}
    what = f"mixture's projections of queries and outputs, {active} of 16 heads active, {active // 2} of them always"
    name = f"mixture-projections-{active}" + "-gradients" * gradients
    what += ", 4096 tokens, forward" + " and backward" * gradients
    return Case(name, what, "the same projections of all heads", projected, shape, {})


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
    _projections(False, 8),
    _projections(True, 8),
    _projections(False, 12),
)
