"""The model classes: each backbone of the library with mixed attention."""

from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.llama.modeling_llama import (
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    LlamaPreTrainedModel,
)
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2Model,
    Qwen2PreTrainedModel,
)
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3Model,
    Qwen3PreTrainedModel,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeForCausalLM,
    Qwen3MoeForSequenceClassification,
    Qwen3MoeModel,
    Qwen3MoePreTrainedModel,
    load_balancing_loss_func,
)
from transformers.utils.output_capturing import OutputRecorder

from .balance import share_of_batch
from .configuration_crosshead import (
    CrossheadLlamaConfig,
    CrossheadQwen2Config,
    CrossheadQwen3Config,
    CrossheadQwen3MoeConfig,
)
from .expert_bias import BIAS, BiasedRouter, give_bias
from .mixed_attention import (
    MixedLlamaAttention,
    MixedQwen2Attention,
    MixedQwen3Attention,
    MixedQwen3MoeAttention,
)
from .mixed_model import MixedBackbone, MixedCausalLM, MixedPreTrained, MixedSequenceClassifier
from .mixture import Mixture

# Stock checkpoints store experts one by one, the model holds them fused. The library's rule for that goes by model
# type, so ours needs an entry, also where this file runs as remote code.
register_checkpoint_conversion_mapping(
    "crosshead_qwen3_moe", get_checkpoint_conversion_mapping("qwen3_moe"), overwrite=True
)
ROUTING = {"head_router_scores": OutputRecorder(Mixture, index=1)}


class CrossheadLlamaPreTrainedModel(MixedPreTrained, LlamaPreTrainedModel):
    """What the Llama classes share."""

    config: CrossheadLlamaConfig
    attention_class = MixedLlamaAttention
    _can_record_outputs = {**LlamaPreTrainedModel._can_record_outputs, **ROUTING}


class CrossheadLlamaModel(MixedBackbone, CrossheadLlamaPreTrainedModel, LlamaModel):
    """Llama with mixed attention."""


class CrossheadLlamaForCausalLM(MixedCausalLM, CrossheadLlamaPreTrainedModel, LlamaForCausalLM):
    """Llama with mixed attention and a language model head."""

    backbone_class = CrossheadLlamaModel


class CrossheadLlamaForSequenceClassification(
    MixedSequenceClassifier, CrossheadLlamaPreTrainedModel, LlamaForSequenceClassification
):
    """Llama with mixed attention and a classification head."""

    backbone_class = CrossheadLlamaModel


class CrossheadQwen2PreTrainedModel(MixedPreTrained, Qwen2PreTrainedModel):
    """What the Qwen2 classes share."""

    config: CrossheadQwen2Config
    attention_class = MixedQwen2Attention
    _can_record_outputs = {**Qwen2PreTrainedModel._can_record_outputs, **ROUTING}


class CrossheadQwen2Model(MixedBackbone, CrossheadQwen2PreTrainedModel, Qwen2Model):
    """Qwen2 with mixed attention."""


class CrossheadQwen2ForCausalLM(MixedCausalLM, CrossheadQwen2PreTrainedModel, Qwen2ForCausalLM):
    """Qwen2 with mixed attention and a language model head."""

    backbone_class = CrossheadQwen2Model


class CrossheadQwen2ForSequenceClassification(
    MixedSequenceClassifier, CrossheadQwen2PreTrainedModel, Qwen2ForSequenceClassification
):
    """Qwen2 with mixed attention and a classification head."""

    backbone_class = CrossheadQwen2Model


class CrossheadQwen3PreTrainedModel(MixedPreTrained, Qwen3PreTrainedModel):
    """What the Qwen3 classes share."""

    config: CrossheadQwen3Config
    attention_class = MixedQwen3Attention
    _can_record_outputs = {**Qwen3PreTrainedModel._can_record_outputs, **ROUTING}


class CrossheadQwen3Model(MixedBackbone, CrossheadQwen3PreTrainedModel, Qwen3Model):
    """Qwen3 with mixed attention."""


class CrossheadQwen3ForCausalLM(MixedCausalLM, CrossheadQwen3PreTrainedModel, Qwen3ForCausalLM):
    """Qwen3 with mixed attention and a language model head."""

    backbone_class = CrossheadQwen3Model


class CrossheadQwen3ForSequenceClassification(
    MixedSequenceClassifier, CrossheadQwen3PreTrainedModel, Qwen3ForSequenceClassification
):
    """Qwen3 with mixed attention and a classification head."""

    backbone_class = CrossheadQwen3Model


class CrossheadQwen3MoePreTrainedModel(MixedPreTrained, Qwen3MoePreTrainedModel):
    """What the Qwen3-MoE classes share."""

    config: CrossheadQwen3MoeConfig
    attention_class = MixedQwen3MoeAttention
    _can_record_outputs = {**Qwen3MoePreTrainedModel._can_record_outputs, **ROUTING}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, BiasedRouter):
            init.zeros_(module.e_score_correction_bias)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # The library looks for a decorator in the file of the class; the experts are the stock ones.
        return Qwen3MoePreTrainedModel._can_set_experts_implementation()


class CrossheadQwen3MoeModel(MixedBackbone, CrossheadQwen3MoePreTrainedModel, Qwen3MoeModel):
    """Qwen3-MoE with mixed attention, and with a bias for each expert where the config says so."""

    def post_init(self) -> None:
        """Replace routers, too, before the starting values are set."""
        if self.config.expert_bias:
            give_bias(self.layers, self.config)
            self._keep_in_fp32_modules_strict = [BIAS]
        super().post_init()


class CrossheadQwen3MoeForCausalLM(MixedCausalLM, CrossheadQwen3MoePreTrainedModel, Qwen3MoeForCausalLM):
    """Qwen3-MoE with mixed attention and a language model head.

    The experts' balance loss is the stock one, over all tokens of a call: dividing a batch into calls changes it.
    Where a batch is accumulated over calls, each call's counts by its share of the tokens; the stock model would add
    it up as often as there are calls.
    """

    backbone_class = CrossheadQwen3MoeModel

    def __init__(self, config: CrossheadQwen3MoeConfig) -> None:
        super().__init__(config)
        self.router_aux_loss_coef = config.router_aux_loss_coef
        self.num_experts = config.num_experts
        self.num_experts_per_tok = config.num_experts_per_tok

    def _losses(
        self,
        outputs: Any,
        logits: torch.Tensor,
        labels: torch.LongTensor | None,
        attention_mask: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> dict[str, Any]:
        losses = super()._losses(outputs, logits, labels, attention_mask, kwargs)
        if outputs.router_logits is None:
            return losses
        aux_loss: Any = load_balancing_loss_func(
            outputs.router_logits, self.num_experts, self.num_experts_per_tok, attention_mask
        )
        if labels is not None:
            weight = self.router_aux_loss_coef * share_of_batch(labels, kwargs)
            losses["loss"] = losses["loss"] + weight * aux_loss.to(losses["loss"].device)
        return losses | {"aux_loss": aux_loss}


class CrossheadQwen3MoeForSequenceClassification(
    MixedSequenceClassifier, CrossheadQwen3MoePreTrainedModel, Qwen3MoeForSequenceClassification
):
    """Qwen3-MoE with mixed attention and a classification head."""

    backbone_class = CrossheadQwen3MoeModel
