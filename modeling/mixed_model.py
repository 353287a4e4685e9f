"""What our model classes add to the stock ones, whatever the backbone."""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from .balance import MixedCausalLMOutput, balance_loss, share_of_batch
from .mechanisms import MECHANISMS
from .mixed_attention import MixedAttention
from .mixer import MASKED_HERE, MixerLeaf

logger = logging.get_logger(__name__)

if TYPE_CHECKING:
    ModelBase = PreTrainedModel
else:
    # Plain classes at run time: the library reads settings of every `PreTrainedModel` on the way to a stock class.
    ModelBase = object


class MixedPreTrained(ModelBase):
    """Starting values and the choice of the attention backend."""

    attention_class: type[MixedAttention]
    backbone_class: type[Any]

    @classmethod
    def _check_config(cls, config: Any) -> None:
        if not hasattr(config, "check_mixers"):
            raise TypeError(f"{cls.__name__} needs a crosshead configuration, not a {type(config).__name__}")
        config.check_mixers()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, MixerLeaf):
            module.initialise(self.config.initializer_range)
        else:
            super()._init_weights(module)

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, *arguments: Any, **options: Any
    ) -> str:
        # An error where a mechanism needs the attention weights and the backend has masks of its own. The library's
        # own flags are per class and come after its search for downloadable kernels. A name that is neither a backend
        # nor a kernel on the Hub is left to the library, which lists the backends there are.
        needing = [name for name in self.config.mixers if MECHANISMS[name].needs_weights]
        name = attn_implementation or "sdpa"
        exists = name in ALL_ATTENTION_FUNCTIONS.valid_keys() or "/" in name
        if needing and exists and name not in MASKED_HERE:
            raise ValueError(
                f"attn_implementation={attn_implementation!r} cannot run {', '.join(map(repr, needing))}, which needs "
                "the attention weights: use 'sdpa' or 'eager', or leave it out"
            )
        return super()._check_and_adjust_attn_implementation(attn_implementation, *arguments, **options)

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = checkpoint, *arguments: Any, **options: Any
    ) -> None:
        asked = getattr(gradient_checkpointing_func, "keywords", {})
        if enable and asked.get("use_reentrant") and "mixture" in self.config.mixers:
            logger.warning_once(
                "use_reentrant=True would drop the gradient of mixture's balance loss, which is computed outside the "
                "checkpointed layers: checkpointing with use_reentrant=False"
            )
            gradient_checkpointing_func = partial(checkpoint, **{**asked, "use_reentrant": False})
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func, *arguments, **options)


class MixedBackbone(MixedPreTrained):
    """Decoder layers with mixed attention where the config says so, stock attention elsewhere."""

    layers: Any

    def __init__(self, config: Any) -> None:
        self._check_config(config)
        super().__init__(config)

    def post_init(self) -> None:
        """Replace attention before the starting values are set."""
        for index, layer in enumerate(self.layers):
            if self.config.mixers_of_layer(index):
                layer.self_attn = self.attention_class(self.config, index)
        super().post_init()
        if "mixture" in self.config.mixers:
            # Now rather than in the first call: the compiler cannot trace the lock that the library takes for it.
            maybe_install_capturing_hooks(self)


class MixedCausalLM(MixedPreTrained):
    """The language model head and the losses."""

    def __init__(self, config: Any) -> None:
        self._check_config(config)
        PreTrainedModel.__init__(self, config)  # the stock class would build a stock backbone first
        self.model = self.backbone_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        output_head_router_scores: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> MixedCausalLMOutput:
        """Logits; with `labels` also the loss, balance losses included."""
        if output_head_router_scores is None:
            output_head_router_scores = getattr(self.config, "output_head_router_scores", False)
        records = "mixture" in self.config.mixers and bool(labels is not None or output_head_router_scores)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_head_router_scores=records,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept, :])
        if records and not outputs.get("head_router_scores"):
            raise RuntimeError(
                f"{type(self.model).__name__} recorded no head router scores, so the balance loss would be missing: "
                "shard or wrap the decoder layers and the whole model, not the backbone in between"
            )
        if past_key_values is not None and isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
            attention_mask = attention_mask[:, -outputs.last_hidden_state.shape[1] :]  # losses know no past
        return MixedCausalLMOutput(
            **self._losses(outputs, logits, labels, attention_mask, kwargs),
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.get("router_logits"),
            head_router_scores=outputs.get("head_router_scores") if output_head_router_scores else None,
        )

    def _losses(
        self,
        outputs: Any,
        logits: torch.Tensor,
        labels: torch.LongTensor | None,
        attention_mask: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> dict[str, Any]:
        """The output's losses by name; `loss` is their weighted sum where there are labels."""
        losses: dict[str, Any] = {"loss": None, "balance_loss": None}
        if labels is not None:
            vocabulary = self.config.vocab_size
            losses["loss"] = self.loss_function(logits=logits, labels=labels, vocab_size=vocabulary, **kwargs)
        scores = outputs.get("head_router_scores")
        if scores:
            layers = map(self.config.mixers_of_layer, range(self.config.num_hidden_layers))
            # From the config: wrappers such as peft's keep copies of the modules.
            routing = [layer["mixture"] for layer in layers if "mixture" in layer]
            selected = [settings["active_heads"] - settings["shared_heads"] for settings in routing]
            losses["balance_loss"] = balance_loss(scores, selected, attention_mask)
            if labels is not None:
                weight = self.config.mixers["mixture"]["balance_weight"] * share_of_batch(labels, kwargs)
                losses["loss"] = losses["loss"] + weight * losses["balance_loss"].to(losses["loss"].device)
        return losses

    def _get_static_cache_init_shape(self) -> Any:
        # The library would allocate the stock model's heads ahead of time; what a mixed layer stores only it knows.
        return None if self.config.mixers else super()._get_static_cache_init_shape()  # type: ignore[misc]


class MixedSequenceClassifier(MixedPreTrained):
    """The classification head, over our backbone rather than one that an Auto class looks up.

    Its loss has no balance term, as that of the stock mixture-of-experts classifier has none.
    """

    def __init__(self, config: Any) -> None:
        self._check_config(config)
        PreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = self.backbone_class(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()
