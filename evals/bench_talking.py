"""`talking`'s attention in blocks beside its plain form, and beside attention without it: time and memory.

Heads are mixed by random maps, which cost what any others cost.
"""

from collections.abc import Mapping

import torch

from crosshead.modeling.mechanisms.base import HeadLayout, HeadStates
from crosshead.modeling.mechanisms.talking import Talking

from .bench_attention import SEED, attention, dense, mixed
from .bench_case import MEMORY, TIME, Case
from .bench_pairs import Run

HEADS = {"heads": 16, "head_dim": 64, "tokens": 4096}
RIVALS = {
    "eager": "eager talking-heads attention, which materialises its weights",
    "sdpa": "stock sdpa attention, which does not mix heads",
}


def talking(ours: bool, beside: str, tokens: int, heads: int, head_dim: int, gradients: bool = False) -> Run:
    """Attention with mixed heads, in blocks or eager, or stock attention."""
    if not ours and beside == "sdpa":
        return attention(dense, tokens, heads, head_dim, gradients)
    torch.manual_seed(SEED)
    layout = HeadLayout(heads * head_dim, heads, heads, head_dim, output_heads=heads)
    mixer = Talking(layout, {"on": ["logits", "weights"], "dynamic": []})
    for maps in mixer.parameters():
        torch.nn.init.normal_(maps, std=heads**-0.5)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        mask = None if ours else torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=query.device).tril()
        return mixed(mixer, HeadStates(query, key, query, key, value), mask, eager=not ours)

    return attention(attend, tokens, heads, head_dim, gradients, mixer.parameters())


def _case(name: str, beside: str, gradients: bool, measured: str = TIME, target: float | None = None) -> Case:
    told = "peak memory beyond the inputs" if measured == MEMORY else "time"
    what = f"talking attention, 4096 tokens, forward{' and backward' * gradients}, {told}"
    shape = HEADS | {"beside": beside, "gradients": gradients}
    targets: Mapping[str, float] = {} if target is None else {"cpu": target, "cuda": target}
    unit = "bytes" if measured == MEMORY else "seconds"
    return Case(f"talking-{name}", what, RIVALS[beside], talking, shape, targets, measured, unit)


CASES = (
    _case("forward", "eager", False, target=0.25),
    _case("gradients", "eager", True, target=0.5),
    _case("forward-memory", "eager", False, MEMORY, target=1 / 32),
    _case("gradients-memory", "eager", True, MEMORY, target=1 / 32),
    _case("forward-beside-sdpa", "sdpa", False, target=2.0),
    _case("gradients-beside-sdpa", "sdpa", True),
    _case("forward-memory-beside-sdpa", "sdpa", False, MEMORY),
    _case("gradients-memory-beside-sdpa", "sdpa", True, MEMORY),
)
