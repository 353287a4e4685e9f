"""`mixture` decoding one token, with the heads that it does not need left unread, beside attention to all heads."""

from itertools import cycle

import torch

from crosshead.modeling.mechanisms.base import HeadStates

from .bench_attention import SEED, layers_in_turn, mixed, stock
from .bench_case import Case
from .bench_mixture import HEADS, router, routes
from .bench_pairs import Run

ACTIVE, SHARED = 8, 4


def decoding(ours: bool, tokens: int, batch: int, heads: int, head_dim: int) -> Run:
    """Attention of one query of each sequence; other heads are needed at each turn."""
    torch.manual_seed(SEED)
    query = torch.randn(batch, heads, 1, head_dim)
    past = layers_in_turn(batch, heads, tokens, head_dim, rivals=heads)
    mixture = router(heads, head_dim, ACTIVE, SHARED)
    gates = cycle(routes(tokens, heads, ACTIVE, SHARED)[0])

    def attend() -> object:
        key, value = next(past)
        with torch.no_grad():
            if not ours:
                return stock(query, key, value)
            return mixed(mixture, HeadStates(query, query, query, key, value, gates=next(gates).expand(batch, 1, -1)))

    return attend


CASES = tuple(
    Case(
        f"mixture-{tokens // 1024}k" + f"-batch-{batch}" * (batch > 1),
        f"mixture, one token after {tokens}, batch {batch}, {ACTIVE} of 16 heads active, {SHARED} of them always",
        "stock sdpa attention on all heads",
        decoding,
        HEADS | {"tokens": tokens, "batch": batch},
        {"cpu": 1.0, "cuda": 1.0},
    )
    for tokens in (2048, 8192, 32768)
    for batch in (1, 8)
)
