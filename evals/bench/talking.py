"""`talking`'s attention in blocks beside its plain form, and beside attention without it: time and memory.

Heads are mixed by random maps, which cost what any others cost.
"""

from collections.abc import Mapping

import torch

from crosshead.modeling.mechanisms.base import AttentionState, HeadLayout
from crosshead.modeling.mechanisms.talking import talking_attention_forward

from .attention import SEED, attention, dense, implementation, in_one_layer, mixed
from .case import MEMORY, TIME, Case
from .pairs import Run

HEADS = {"heads": 16, "head_dim": 64, "tokens": 4096}
RIVALS = {
    "eager": "eager talking-heads attention, which materialises its weights",
    "sdpa": "stock sdpa attention, which does not mix heads",
}


def talking(
    ours: bool,
    beside: str,
    tokens: int,
    heads: int,
    head_dim: int,
    gradients: bool = False,
    published: bool = False,
) -> Run:
    """Attention with mixed heads, in blocks or eager, or stock attention.

    `published` takes the function that a published model brings, which runs where crosshead is not installed.
    """
    if not ours and beside == "sdpa":
        return attention(dense, tokens, heads, head_dim, gradients)
    torch.manual_seed(SEED)
    mechanism = in_one_layer("talking", {}, HeadLayout(heads * head_dim, heads, heads, head_dim))
    for maps in mechanism.parameters():
        torch.nn.init.normal_(maps, std=heads**-0.5)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        state = AttentionState(query, key, query, key, value)
        if not ours:
            mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=query.device).tril()
            return mixed(mechanism, state, mask, "eager")
        if published:
            return mixed(mechanism, state, function=talking_attention_forward)
        return mixed(mechanism, state, implementation=implementation("talking", query.device))

    return attention(attend, tokens, heads, head_dim, gradients, mechanism.parameters())


def _case(
    name: str,
    beside: str,
    gradients: bool,
    measured: str = TIME,
    target: float | None = None,
    published: bool = False,
) -> Case:
    told = "peak memory beyond the inputs" if measured == MEMORY else "time"
    what = f"talking attention{', without crosshead installed' * published}, 4096 tokens"
    what += f", forward{' and backward' * gradients}, {told}"
    shape = HEADS | {"beside": beside, "gradients": gradients, "published": published}
    targets: Mapping[str, float] = {} if target is None else {"cpu": target, "cuda": target}
    unit = "bytes" if measured == MEMORY else "seconds"
    return Case(f"talking-{name}", what, RIVALS[beside], talking, shape, targets, measured, unit)


CASES = (
    _case("forward", "eager", False, target=0.35),
    _case("gradients", "eager", True, target=0.5),
    _case("forward-memory", "eager", False, MEMORY, target=1 / 32),
    _case("gradients-memory", "eager", True, MEMORY, target=1 / 32),
    _case("forward-beside-sdpa", "sdpa", False, target=2.2),
    _case("published-beside-sdpa", "sdpa", False, target=2.2, published=True),
    _case("gradients-beside-sdpa", "sdpa", True),
    _case("forward-memory-beside-sdpa", "sdpa", False, MEMORY),
    _case("gradients-memory-beside-sdpa", "sdpa", True, MEMORY),
)
