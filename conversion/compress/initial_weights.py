"""Initial weights of `differential` and `bilinear` that keep the source's outputs.

`differential` doubles every query head to a pair of heads. In version 2, both heads of a pair are copies of the
source's head, so that their difference is `1 - lambda` times its output, and the output projection is divided by this
factor. Lambda starts as a small constant, set by its bias.

In version 1 with `half_values`, keys are doubled as well, and a value head is split into the two halves of a pair's
values. The second keys start at zero, which gives uniform attention, or as copies if keys are normalised, because the
norm of a zero key has no useful gradient. Lambda starts at zero, set by the vectors of its second term.

`bilinear` multiplies projections: `P_h = W_q,h W_k,h^T`, `Q_h = W_v,h W_o,h` per head. The source must be multi-head
attention without biases, whose logits are not scaled (T5). Paper: "Talking-Heads Attention", section 6.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from crosshead.common.errors import ConversionError
from crosshead.modeling.mechanisms.base import HeadLayout, Settings
from crosshead.modeling.mechanisms.differential import Differential
from crosshead.modeling.options import Layers

from .layer_rewrites import Tensors

START = 0.05
"""Initial lambda of `differential` in version 2."""
COMBINABLE = {"differential", "knocking", "gating"}
"""Mechanisms that only add tensors, so that a conversion can combine them with doubled heads."""


def makes_pairs(settings: Settings | None) -> bool:
    """True if a conversion doubles the heads for `differential` with these options."""
    return settings is not None and (settings.get("version", 1) == 2 or bool(settings.get("half_values")))


def doubled_heads(mixers: Mapping[str, Settings], config: Any) -> dict[str, Any]:
    """Return the config fields that change because heads are doubled; {} if they are not."""
    settings = mixers.get("differential")
    if settings is None or not makes_pairs(settings):
        return {}
    if others := sorted(mixers.keys() - COMBINABLE):
        raise ConversionError(
            f"--mixer {others[0]} cannot be added together with pairs of heads for 'differential': add only "
            f"{', '.join(sorted(COMBINABLE - {'differential'}))}, or use differential:version=1"
        )
    try:
        layers = Layers().parse("mixers.differential.layers", settings.get("layers"), config.num_hidden_layers)
    except ValueError as error:
        raise ConversionError(str(error)) from None
    if layers not in (None, [*range(config.num_hidden_layers)]):
        raise ConversionError(
            f"mixers.differential.layers={settings['layers']!r} is not allowed here: a config has one number of "
            "heads, which is doubled in all layers; omit it"
        )
    heads, key_value_heads = config.num_attention_heads, config.num_key_value_heads
    return {
        "num_attention_heads": 2 * heads,
        "num_key_value_heads": key_value_heads if settings.get("version", 1) == 2 else 2 * key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
    }


def paired_names(settings: Settings) -> list[str]:
    """Return the parts that `pair_heads` changes; lists biases even if the model has none."""
    names = ["q_proj.weight", "q_proj.bias"]
    return names + (["o_proj.weight"] if settings["version"] == 2 else ["k_proj.weight", "k_proj.bias"])


def pair_heads(tensors: Tensors, created: Tensors, layout: HeadLayout, mechanism: Differential) -> Tensors:
    """Return the attention tensors with doubled heads; `created` are the initial tensors of the mechanism."""
    new, prefix = dict(tensors), "mixers.differential.lambda"
    for name in ("q_proj.weight", "q_proj.bias"):
        if name in tensors:
            new[name] = _by_head(tensors[name], layout).repeat_interleave(2, dim=0).flatten(0, 1)
    if mechanism.version == 2:
        new["o_proj.weight"] = tensors["o_proj.weight"] / (1 - START)
        new[f"{prefix}_proj.weight"] = torch.zeros_like(created[f"{prefix}_proj.weight"])
        new[f"{prefix}_bias"] = torch.full_like(created[f"{prefix}_bias"], math.log(START / (1 - START)))
        return new
    for name in ("k_proj.weight", "k_proj.bias"):
        if name in tensors:
            first = _by_head(tensors[name], layout)
            second = torch.zeros_like(first) if layout.key_norm_eps is None else first
            new[name] = torch.stack([first, second], dim=1).flatten(0, 2)
    # solve lambda = exp(q1 . k1) - exp(q2 . k2) + lambda_init = 0 for q2 = k2, or q2 = -k2 if q2 . k2 is negative
    first_term = math.exp(float(created[f"{prefix}_q1"] @ created[f"{prefix}_k1"]))
    product = math.log(first_term + mechanism.lambda_init)
    size = math.sqrt(abs(product) / layout.head_dim)
    for name, value in ((f"{prefix}_q2", size), (f"{prefix}_k2", math.copysign(size, product))):
        new[name] = torch.full_like(created[name], value)
    return new


def _by_head(tensor: torch.Tensor, layout: HeadLayout) -> torch.Tensor:
    return tensor.unflatten(0, (-1, layout.head_dim))


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
