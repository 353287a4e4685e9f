"""Attention of a few queries to one long line of keys, cut into parts that the processor's threads take at once.

torch's kernel for CPUs is the whole of attention in one call, and keeps scores in the nearest memory. It gives each
thread the queries of a head, of which there is one here: so each part of the keys is a head to it. It says by which
logarithm of a sum the weights of each part were divided, and the parts count by these.
"""

import torch

from .traced import traced

attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
LEAST_KEYS = 256
"""Of a part; fewer are sooner taken by one thread than given to several."""


def takes(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether the kernel is to be had for these, as `attended_in_parts` has them; their features must have no gaps."""
    if torch.is_grad_enabled() or traced():  # a graph must not depend on sizes
        return False
    if query.device.type != "cpu" or query.dtype != torch.float32 or keys.shape != values.shape:
        return False
    if not query.stride(-1) == keys.stride(-1) == values.stride(-1) == 1:
        return False
    return mask is None or mask.shape[1:3] == (1, 1)


def attended_in_parts(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Outputs (B, rows, k) of scaled queries (B, rows, k) to keys and values (B, S, k), without gradients.

    `mask` (B or 1, 1, 1, S) is True where a key is seen, or is added to scores, and then finite.
    """
    batch, length = keys.shape[:2]
    added = None if mask is None else _added(mask[:, 0, 0], query.dtype).expand(batch, -1)
    parts = min(-(-torch.get_num_threads() // batch), length // LEAST_KEYS)
    if parts < 2:
        return _attended(query, keys, values, added, 1)[0].squeeze(1)
    whole, found = length - length % parts, []
    for some, count in ((slice(whole), parts), (slice(whole, None), 1)):
        if len(range(length)[some]):
            of_mask = None if added is None else added[:, some]
            found.append(_attended(query, keys[:, some], values[:, some], of_mask, count))
    outputs, logarithms = (torch.cat(each, 1) for each in zip(*found, strict=True))
    return (outputs * torch.softmax(logarithms, 1).unsqueeze(-1)).sum(1)


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is added to scores; finite, so that queries that see nothing stay so."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)


def _attended(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, added: torch.Tensor | None, parts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs (B, parts, rows, k), and the logarithms (B, parts, rows)."""
    added = None if added is None else added.unflatten(1, (parts, -1)).unsqueeze(2)
    heads = (x.unflatten(1, (parts, -1)) for x in (keys, values))
    outputs, logarithms = attend(query.unsqueeze(1).expand(-1, parts, -1, -1), *heads, attn_mask=added, scale=1.0)
    return outputs, logarithms
