"""Loss-free balancing of experts: a bias that only the choice of a token's experts sees.

It is added to the experts' probabilities where the largest are looked for. The weights of those chosen are made of
the probabilities alone, so that no gradient reaches it; training moves it by how many tokens each expert had. Wang et
al., Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts, 2024. With a bias of zero it is the stock
router, bit for bit.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock, Qwen3MoeTopKRouter

BIAS = "e_score_correction_bias"
"""The buffer's name, which other models with such a bias have as well."""


class BiasedRouter(Qwen3MoeTopKRouter):
    """The stock router with a bias for each expert, in float32 whatever the dtype of the model."""

    e_score_correction_bias: torch.Tensor

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer(BIAS, torch.zeros(config.num_experts).float())  # ZeRO-3 passes over a `dtype=` in `zeros`

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits (tokens, experts), and of the chosen experts (tokens, k) the weights and indices."""
        logits = functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        probabilities = functional.softmax(logits, dtype=torch.float, dim=-1)
        chosen = (probabilities.detach() + self.e_score_correction_bias).topk(self.top_k, dim=-1).indices
        weights = probabilities.gather(-1, chosen)
        if self.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights.to(logits.dtype), chosen

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "BiasedRouter":
        # As `model.to(torch.bfloat16)` and DeepSpeed do: steps of a thousandth would be lost in the rounding.
        exact = self.e_score_correction_bias
        super()._apply(fn, recurse)
        if self.e_score_correction_bias.dtype != torch.float32:
            self.e_score_correction_bias = exact.to(self.e_score_correction_bias.device, torch.float32)
        return self


def give_bias(layers: Any, config: Any) -> None:
    """Put these routers in the place of the stock ones."""
    for layer in layers:
        if isinstance(layer.mlp, Qwen3MoeSparseMoeBlock):
            layer.mlp.gate = BiasedRouter(config)
