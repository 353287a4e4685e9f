"""Qwen3-MoE with mechanisms in its attention, and optionally with auxiliary-loss-free load balancing of its experts.

With `expert_bias`, the router adds a bias per expert to the probabilities for the top-k selection only. The weights of
the selected experts use the probabilities without it, so that it gets no gradient; training updates it from the number
of tokens per expert (Wang et al., Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts, 2024). With a
bias of zero, the router equals the stock one, bit for bit.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers.initialization as init
import transformers.models.qwen3_moe.modeling_qwen3_moe as stock
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3MoeConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from ..attention import CrossheadAttention
from ..configuration import MixersConfig
from ..mechanisms.base import AuxiliaryLoss
from ..model import RECORDERS, CrossheadBackbone, CrossheadCausalLM, CrossheadClassifier, CrossheadPreTrained

# Stock checkpoints store each expert separately; the model holds them fused. transformers looks up the conversion by
# model type, so this model type needs its own entry, also when this code runs as remote code.
register_checkpoint_conversion_mapping(
    "crosshead_qwen3_moe", get_checkpoint_conversion_mapping("qwen3_moe"), overwrite=True
)
EXPERT_BIAS = "e_score_correction_bias"  # the buffer's name in other transformers models

__all__ = [
    "CrossheadQwen3MoeConfig",
    "CrossheadQwen3MoeForCausalLM",
    "CrossheadQwen3MoeForSequenceClassification",
    "CrossheadQwen3MoeModel",
]


class CrossheadQwen3MoeConfig(MixersConfig, Qwen3MoeConfig):
    """`Qwen3MoeConfig` plus `mixers` and `expert_bias`; config.json contains `expert_bias` only if it is true."""

    model_type = "crosshead_qwen3_moe"
    class_prefix = "CrossheadQwen3Moe"
    has_key_norm = True
    mixers: dict[str, Any] | None = None
    expert_bias: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        """Check that `expert_bias` is a bool."""
        super().__post_init__(**kwargs)
        if not isinstance(self.expert_bias, bool):
            raise ValueError(f"expert_bias={self.expert_bias!r} is not allowed: use true or false")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are saved to config.json."""
        content: dict[str, Any] = super().to_dict()
        if not self.expert_bias:
            del content["expert_bias"]
        return content


class CrossheadQwen3MoeAttention(CrossheadAttention, stock.Qwen3MoeAttention):
    """Qwen3-MoE attention with mechanisms."""


class BiasedRouter(stock.Qwen3MoeTopKRouter):
    """The stock router with a bias per expert, kept in float32 whatever the dtype of the model."""

    e_score_correction_bias: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        # ZeRO-3 ignores a `dtype=` in `zeros`.
        self.register_buffer(EXPERT_BIAS, torch.zeros(config.num_experts).float())

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits (tokens, experts), and the weights and indices of the selected experts (tokens, k)."""
        logits = functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        probabilities = functional.softmax(logits, dtype=torch.float, dim=-1)
        chosen = (probabilities.detach() + self.e_score_correction_bias).topk(self.top_k, dim=-1).indices
        weights = probabilities.gather(-1, chosen)
        if self.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights.to(logits.dtype), chosen

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "BiasedRouter":
        # bfloat16, as after `model.to(torch.bfloat16)`, would round away update steps of 0.001.
        exact = self.e_score_correction_bias
        super()._apply(fn, recurse)
        if self.e_score_correction_bias.dtype != torch.float32:
            self.e_score_correction_bias = exact.to(self.e_score_correction_bias.device, torch.float32)
        return self


class CrossheadQwen3MoePreTrainedModel(CrossheadPreTrained, stock.Qwen3MoePreTrainedModel):
    """Base class of the Qwen3-MoE models."""

    config: CrossheadQwen3MoeConfig
    attention_class = CrossheadQwen3MoeAttention
    _can_record_outputs = {**stock.Qwen3MoePreTrainedModel._can_record_outputs, **RECORDERS}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, BiasedRouter):
            init.zeros_(module.e_score_correction_bias)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # transformers looks for a decorator in the class's source file; the experts are the stock ones.
        return stock.Qwen3MoePreTrainedModel._can_set_experts_implementation()


class CrossheadQwen3MoeModel(CrossheadBackbone, CrossheadQwen3MoePreTrainedModel, stock.Qwen3MoeModel):
    """Qwen3-MoE decoder, with a bias per expert if `config.expert_bias`."""

    def post_init(self) -> None:
        """Replace the routers if `expert_bias`, before the weights are initialised."""
        if self.config.expert_bias:
            for layer in self.layers:
                if isinstance(layer.mlp, stock.Qwen3MoeSparseMoeBlock):
                    layer.mlp.gate = BiasedRouter(self.config)
            self._keep_in_fp32_modules_strict = [EXPERT_BIAS]
        super().post_init()


class CrossheadQwen3MoeForCausalLM(CrossheadCausalLM, CrossheadQwen3MoePreTrainedModel, stock.Qwen3MoeForCausalLM):
    """Qwen3-MoE causal language model; gradient accumulation weights balance losses by predicted tokens."""

    backbone_class = CrossheadQwen3MoeModel

    def __init__(self, config: CrossheadQwen3MoeConfig) -> None:
        super().__init__(config)
        self.router_aux_loss_coef = config.router_aux_loss_coef
        self.num_experts, self.num_experts_per_tok = config.num_experts, config.num_experts_per_tok

    def _auxiliary_losses(self, outputs: Any, attention_mask: Tensor | None) -> Iterator[AuxiliaryLoss]:
        yield from super()._auxiliary_losses(outputs, attention_mask)
        if outputs.router_logits is not None:
            counts = self.num_experts, self.num_experts_per_tok
            value: Any = stock.load_balancing_loss_func(outputs.router_logits, *counts, attention_mask)
            yield AuxiliaryLoss("aux_loss", value, self.router_aux_loss_coef)


class CrossheadQwen3MoeForSequenceClassification(
    CrossheadClassifier, CrossheadQwen3MoePreTrainedModel, stock.Qwen3MoeForSequenceClassification
):
    """Qwen3-MoE sequence classifier."""

    backbone_class = CrossheadQwen3MoeModel
