"""Decoding under a mixture: the keys and values of heads that no active query head reads are left unread.

A token chooses its heads, so that which of them the cache must give up changes from token to token; they are read
where they lie, one by one. What a needed head's other readers get counts as little as
what the heads left out get: the gates are zero.
"""

import torch

from .few_queries import met_one_by_one, settled, weighed_one_by_one
from .mixer import AttentionCall
from .traced import traced

LEAST_KEYS = 4096
"""From here on what is left unread is worth the steps that are added."""
GREATEST_PART = 0.75
"""Of the heads that are needed; above, a dense kernel that reads all is as soon done."""


def reads_less(query: torch.Tensor, key: torch.Tensor, call: AttentionCall) -> bool:
    """Whether this is decoding where heads may be left unread."""
    if query.device.type != "cpu" or query.shape[2] != 1 or key.shape[2] < LEAST_KEYS:
        return False
    if not call.plain or call.dropout or traced() or torch.is_autocast_enabled("cpu"):
        return False
    return call.mask is None or (call.mask.dtype == torch.bool and call.mask.shape[1] == 1)  # one mask for all heads


def attend_to_needed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chosen: torch.Tensor, call: AttentionCall
) -> torch.Tensor | None:
    """Outputs (B, 1, H, d) of one query for each head, zeros of heads left unread; None where most are needed.

    `chosen` (B, 1, H) says which queries count.
    """
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
