"""Tiny TransNeXt models for the tests."""

from typing import Any

import torch

from crosshead import CrossheadTransNextConfig, CrossheadTransNextForImageClassification
from toys import lopsided

SIZES: dict[str, Any] = {
    "image_size": 64,
    "hidden_sizes": [8, 16, 24, 32],
    "num_attention_heads": [2, 4, 4, 4],
    "depths": [1, 1, 2, 1],
    "mlp_ratios": [3, 4, 2, 2],
    "num_labels": 3,
}
GLOBAL = [4]
ROUTED = {"mixture": {"active_heads": [2, 4, 3, 3, 3], "shared_heads": [2, 4, 2, 2, 0]}}
"""Mixture options like MoH-ViT: in the first two stages every head is shared."""
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixture": ROUTED,
    "mixture, paper": {"mixture": ROUTED["mixture"] | {"gate_scale": "paper"}},
    "knocking+mixture": {
        "knocking": {"on": ["query", "key", "value"]},
        "mixture": {"active_heads": 3, "shared_heads": 1, "router": "query_norm", "layers": [1, 2, 3, 4]},
    },
    "gating": {"gating": {}},
    "talking": {"talking": {"layers": GLOBAL, "dynamic": ["query_logits", "key_weights"]}},
    "differential": {"differential": {"layers": GLOBAL}},
}
CONSTANT = "transnext.block4.0.attn.cpb_fc2.bias"
"""Parameter whose gradient is zero: it adds the same constant to all logits of a softmax."""
IMAGES = torch.randn(2, 3, 29, 37, generator=torch.Generator().manual_seed(3))
LABELS = torch.tensor([0, 2])


def model_of(
    mixers: dict[str, Any], backend: str = "eager", **changes: Any
) -> CrossheadTransNextForImageClassification:
    """Return a tiny TransNeXt classifier with lopsided weights."""
    config = CrossheadTransNextConfig(**(SIZES | changes), mixers=mixers)
    config._attn_implementation = backend
    return lopsided(CrossheadTransNextForImageClassification(config)).eval()
