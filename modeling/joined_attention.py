"""Attention of some queries to keys that all of them see, and to keys behind that not all see, joined.

torch's kernel for CPUs takes each part and says by which logarithm of a sum its weights were divided; the parts count
by these. It keeps scores in the processor's nearest memory, which a matrix of all of them does not fit in.
"""

import torch

attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def joined_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, common: int, behind: torch.Tensor | None
) -> torch.Tensor:
    """Outputs (n, d) of scaled queries (n, d) to keys and values (S, d), without gradients.

    All see the keys before `common`; `behind` (n, S - common) is added to the scores of the others, if there are any.
    Each query sees a key.
    """
    parts = []
    if common:
        parts.append(_attended(query, key[:common], value[:common], None))
    if behind is not None:
        parts.append(_attended(query, key[common:], value[common:], behind.to(query.dtype)))
    if len(parts) == 1:
        return parts[0][0]
    (first, of_first), (second, of_second) = parts
    return torch.lerp(first, second, torch.sigmoid(of_second - of_first).unsqueeze(-1).to(first.dtype))


def _attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, added: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs (n, d), and the logarithms (n)."""
    heads = (x[None, None] for x in (query, key, value))
    output, logarithms = attend(*heads, attn_mask=None if added is None else added[None, None], scale=1.0)
    return output[0, 0], logarithms.flatten()
