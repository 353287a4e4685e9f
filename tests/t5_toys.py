"""Attention layers of a tiny T5 with their oracle, and inputs for the whole model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import oracle_routing
import oracles
from oracle_arithmetic import LayerShape
from oracle_layers import additive, oracle_view
from toy_checkpoints import MANY_SHARDS, write_model
from toys import lopsided, mixed_model, stock_config, tokens

PARTS = ("encoder", "decoder", "cross")
MASK = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
MIXTURE = {"mixture": {"shared_heads": 2, "active_heads": 3}}
ANSWER = tokens(length=5, seed=3)
INPUTS: dict[str, Any] = {"input_ids": tokens(), "attention_mask": MASK}
PART_SETTINGS: dict[str, dict[str, Any]] = {
    "encoder": {"padding": True},
    "decoder": {"causal": True},
    "cross": {"others": 7, "padding": True},
}
"""Mask and key source per part; `others` is the length of the other sequence in cross-attention."""


def write_t5(
    folder: Path, task: str = "ForConditionalGeneration", is_untied: bool = False, many: bool = False, **changes: Any
) -> Path:
    """Save a stock T5 with a tokenizer; if `is_untied`, lm_head has its own weights; if `many`, in several shards."""
    model = lopsided(getattr(transformers, f"T5{task}")(stock_config("T5", **changes)))
    if is_untied:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0) + 0.01)
        del model.all_tied_weights_keys["lm_head.weight"]
    dtype = getattr(torch, str(changes.get("dtype", "float32")))
    return write_model(model, folder, MANY_SHARDS if many else None, dtype)


def oracle_balance_loss(scores: Sequence[Tensor], valid: Tensor) -> Tensor:
    """Return the oracle's balance loss of MIXTURE, which selects one routed head, over the valid tokens (B, T)."""
    selected = [torch.zeros_like(layer).scatter(-1, layer.topk(1, -1).indices, 1.0) for layer in scores]
    return oracle_routing.balance_loss(list(zip(scores, selected, strict=True)), valid)


class PartLayer:
    """The first attention layer of a part ("encoder", "decoder", "cross") in float64, with random inputs."""

    def __init__(self, part: str, mixers: dict[str, Any], backend: str = "eager") -> None:
        self.part = part
        self.model = mixed_model("T5", {part: mixers}, backend=backend).double()
        stack = self.model.encoder if part == "encoder" else self.model.decoder
        block = stack.block[0].layer
        self.attention = block[1].EncDecAttention if part == "cross" else block[0].SelfAttention
        self.config, self.index = stack.config, 1 if part == "cross" else 0
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(2, 5, 32, generator=generator, dtype=torch.float64)
        others = PART_SETTINGS[part].get("others")
        self.source = torch.randn(2, others, 32, generator=generator, dtype=torch.float64) if others else None
        self.allowed = torch.ones(2, 5, others or 5, dtype=torch.bool)
        if PART_SETTINGS[part].get("causal"):
            self.allowed = self.allowed.tril()
        if PART_SETTINGS[part].get("padding"):
            self.allowed[1, :, 3:] = False
        self.inputs.requires_grad_()

    def ours(self) -> Tensor:
        """Return the output of the layer under test (B, T, hidden)."""
        eager = self.config._attn_implementation == "eager"
        mask = additive(self.allowed) if eager else self.allowed[:, None]
        output: Tensor = self.attention(self.inputs, mask, self.source)[0]
        return output

    def bias(self) -> Tensor | None:
        """Return the relative position bias (H, T, S), read entry by entry from its table; None in cross-attention."""
        if self.part == "cross":
            return None
        table = self.attention.relative_attention_bias.weight
        bias = torch.empty(4, 5, 5, dtype=torch.float64)
        for t in range(5):
            for s in range(5):  # each distance < 8 has its own bucket; buckets of later keys start at 16
                bucket = t - s if s <= t else 16 + s - t
                bias[:, t, s] = table[bucket if self.part == "encoder" else max(t - s, 0)]
        return bias

    def truth(self) -> Tensor:
        """Return the output of the oracle (B, T, hidden)."""
        mixers, _ = oracle_view(self.config, self.index)
        names = {f"{name}.": f"{name}_proj." for name in "qkvo"}
        weights = {
            names.get(name[:2], name[:2]) + name[2:] if name[:2] in names else name: weight
            for name, weight in self.attention.named_parameters()
        }
        shape = LayerShape(4, 4, 8, 0, 1e-6, has_qk_norm=False, is_scaled=False)
        options = {"source": self.source, "bias": self.bias()}
        return oracles.attention_layer(self.inputs, weights, shape, mixers, None, None, self.allowed, **options)[0]
