"""Initial `bilinear` weights that keep the source's outputs: `P_h = W_q,h W_k,h^T`, `Q_h = W_v,h W_o,h` per head.

The source must be multi-head attention without biases, whose logits are not scaled (T5).

Paper: "Talking-Heads Attention", section 6.
"""

import torch

from crosshead.modeling.mechanisms.base import HeadLayout

from .layer_rewrites import Tensors


def multiply_projections(tensors: Tensors, layout: HeadLayout) -> Tensors:
    """Return the tensors with the query and output projection of `bilinear`, the products of the head projections."""
    heads = layout.query_heads
    query, key, value = (tensors[f"{name}_proj.weight"].double().unflatten(0, (heads, -1)) for name in "qkv")
    output = tensors["o_proj.weight"].double().unflatten(1, (heads, -1))  # (hidden, h, d), others (h, d, hidden)
    products = {
        "q_proj.weight": torch.einsum("hdj,hdi->hji", key, query).flatten(0, 1),
        "o_proj.weight": torch.einsum("ohd,hdj->ohj", output, value).flatten(1),
    }
    return tensors | {name: product.to(tensors[name]) for name, product in products.items()}
