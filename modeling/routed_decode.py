"""Decoding under a mixture: the keys and values of heads that no active query head reads are left unread.

A token chooses its heads, so that which of them the cache must give up changes from token to token; they are read
where they lie: on a CPU one by one, on a GPU by `routed_decode_triton`, where asked for. What a needed head's other
readers get counts as little as what the heads left out get: the gates are zero.
"""

import torch

from .few_queries import met_one_by_one, settled, weighed_one_by_one
from .mixer import AttentionCall, HeadLayout
from .traced import traced, transformed
from .where_triton_runs import MOST_FEATURES, runs_triton

LEAST_KEYS = 4096
"""From here on what is left unread is worth the steps that are added; on a GPU, a guess that awaits measuring."""
GREATEST_PART = 0.75
"""Of the heads that are needed; above, a dense kernel that reads all is as soon done."""


def needed_part(layout: HeadLayout, shared: int, selected: int) -> float:
    """Which part of the key/value heads a token needs, where the first `shared` query heads always count.

    Of the others `selected` do, any of them alike.
    """
    heads = layout.key_value_heads
    readers = layout.query_heads // heads
    unneeded = (1 - selected / (layout.query_heads - shared)) ** readers
    return sum(1.0 if head * readers < shared else 1 - unneeded for head in range(heads)) / heads


def reads_less(query: torch.Tensor, key: torch.Tensor, part: float, call: AttentionCall) -> bool:
    """Whether this is decoding where heads may be left unread, of which about this part is needed."""
    if query.shape[2] != 1 or key.shape[2] < LEAST_KEYS or not call.plain or call.dropout:
        return False
    if call.mask is not None and (call.mask.dtype != torch.bool or call.mask.shape[1] != 1):  # not one for all heads
        return False
    if runs_triton(query):
        # Nothing there can wait for the GPU to say what is needed indeed.
        fits = part <= GREATEST_PART and query.shape[3] <= MOST_FEATURES and not torch.is_grad_enabled()
        return fits and not transformed() and not torch.is_autocast_enabled(query.device.type)
    return query.device.type == "cpu" and not traced() and not torch.is_autocast_enabled("cpu")


def attend_to_needed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chosen: torch.Tensor, call: AttentionCall
) -> torch.Tensor | None:
    """Outputs (B, 1, H, d) of one query for each head, zeros of heads left unread; None where most are needed.

    `chosen` (B, 1, H) says which queries count.
    """
    if runs_triton(query):
        from .routed_decode_triton import attend_to_chosen

        mask = None if call.mask is None else call.mask[:, 0]
        return attend_to_chosen(query, key, value, chosen, mask, call.scaling)
    needed = chosen.view(len(query), key.shape[1], -1).any(-1)  # (B, heads)
    if float(needed.float().mean()) > GREATEST_PART:
        return None
    rows = (query * call.scaling).reshape(*needed.shape, -1, query.shape[-1])
    output = value.new_zeros(*rows.shape[:3], value.shape[-1])
    for sequence, heads in enumerate(needed):
        read = heads.nonzero().flatten()
        if len(read):
            keys, values = ([x[sequence, head] for head in read.tolist()] for x in (key, value))
            mask = None if call.mask is None else call.mask.expand(len(query), -1, -1, -1)[sequence : sequence + 1]
            logits = settled(met_one_by_one(rows[sequence, read], keys)[None], None, mask)
            output[sequence, read] = weighed_one_by_one(torch.softmax(logits, -1)[0].to(query.dtype), values)
    return output.flatten(1, 2).unsqueeze(1)
