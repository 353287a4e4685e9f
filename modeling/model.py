"""Base classes that add mechanisms to the stock models of any backbone: initial values, outputs and losses."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import transformers.initialization as init
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import OutputRecorder, maybe_install_capturing_hooks

from .attention import CrossheadAttention, HeadScale
from .backends import logger
from .cache import CACHE
from .mechanisms import MECHANISMS
from .mechanisms.base import AuxiliaryLoss, ParameterModule

if TYPE_CHECKING:
    ModelBase = PreTrainedModel
else:  # a plain class: transformers would read class settings from every `PreTrainedModel` in the MRO
    ModelBase = object
IGNORED_LABEL = -100
RECORDERS = {
    name: OutputRecorder(mechanism, index=index)
    for mechanism in MECHANISMS.values()
    for name, index in mechanism.recorded.items()
}
"""Output field of a mechanism -> transformers' recorder of it, for `_can_record_outputs`."""


@dataclass
class CrossheadCausalLMOutput(MoeCausalLMOutputWithPast):
    """Output of a causal language model, with balance loss and head router scores."""

    balance_loss: Tensor | None = None  # before its weight, mean over the routing layers
    head_router_scores: tuple[Tensor, ...] | None = None  # per routing layer: (B, T, routed heads)


def share_of_batch(labels: Tensor, kwargs: dict[str, Any]) -> Tensor | float:
    """Return this call's share of the predicted tokens over which gradients are accumulated.

    A training loop that accumulates over several calls or devices passes their total number of predicted tokens as
    `num_items_in_batch`, and sums the losses of the calls.
    """
    items = kwargs.get("num_items_in_batch")
    if items is None:
        return 1.0
    targets = labels[..., 1:] if kwargs.get("shift_labels") is None else kwargs["shift_labels"]
    return targets.ne(IGNORED_LABEL).sum() / items


class CrossheadPreTrained(ModelBase):
    """Base class of all models: initialises mechanisms, and checks the config and `attn_implementation`."""

    attention_class: type[CrossheadAttention]
    backbone_class: type[Any]

    @classmethod
    def _check_config(cls, config: Any) -> None:
        if not hasattr(config, "check_mixers"):
            raise TypeError(f"{cls.__name__} needs a crosshead configuration, not a {type(config).__name__}")
        config.check_mixers()

    def _recorded(self) -> list[str]:
        """Return the output fields that this model's mechanisms record."""
        return [field for name in self.config.mechanisms() for field in MECHANISMS[name].recorded]

    def _auxiliary_losses(self, outputs: Any, attention_mask: Tensor | None) -> Iterator[AuxiliaryLoss]:
        for name in self.config.mechanisms():
            if (loss := MECHANISMS[name].auxiliary_loss(outputs, self.config, attention_mask)) is not None:
                yield loss

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, ParameterModule):
            module.initialise(self.config.initializer_range)
        elif isinstance(module, HeadScale):  # transformers knows norms by their class name
            init.ones_(module.weight)
        else:
            super()._init_weights(module)

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, *arguments: Any, **options: Any
    ) -> str:
        # Check before transformers looks for kernels on the Hub; it reports unknown names itself.
        if (name := attn_implementation or "sdpa") in ALL_ATTENTION_FUNCTIONS.valid_keys() or "/" in name:
            for mechanism, settings in self.config.mechanisms().items():
                MECHANISMS[mechanism].check_implementation(name, settings)
        return super()._check_and_adjust_attn_implementation(attn_implementation, *arguments, **options)

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = checkpoint, *arguments: Any, **options: Any
    ) -> None:
        keywords = getattr(gradient_checkpointing_func, "keywords", {})
        if enable and keywords.get("use_reentrant") and self._recorded():
            logger.warning_once(
                "use_reentrant=True would drop the gradient of the balance loss, which is computed outside the "
                "checkpointed layers: checkpointing with use_reentrant=False"
            )
            gradient_checkpointing_func = partial(checkpoint, **{**keywords, "use_reentrant": False})
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func, *arguments, **options)


class CrossheadBackbone(CrossheadPreTrained):
    """A backbone whose attention has mechanisms in the layers that the config names; other layers stay stock."""

    layers: Any

    def __init__(self, config: Any, **options: Any) -> None:
        self._check_config(config)
        super().__init__(config, **options)

    def _attention_modules(self) -> Iterator[tuple[int, nn.Module, str]]:
        """Yield (layer index, parent module, attribute name) of each attention module."""
        return ((index, layer, "self_attn") for index, layer in enumerate(self.layers))

    def post_init(self) -> None:
        """Replace stock attention modules before weights are initialised."""
        for index, parent, name in self._attention_modules():
            if self.config.mixers_of_layer(index) and not isinstance(getattr(parent, name), CrossheadAttention):
                setattr(parent, name, self.attention_class(self.config, index))
        super().post_init()
        self._tp_plan = {**(self._tp_plan or {}), **self.config.attention_plan()}

    @torch.compiler.assume_constant_result  # torch.compile cannot trace the lock in transformers
    def record_outputs(self) -> list[str]:
        """Install hooks that record outputs, and return the recorded fields. Without hooks, decoding is faster."""
        if names := self._recorded():
            maybe_install_capturing_hooks(self)
        return names


class CrossheadCausalLM(CrossheadPreTrained):
    """A causal language model over a crosshead backbone; its loss includes auxiliary losses."""

    def __init__(self, config: Any) -> None:
        self._check_config(config)
        PreTrainedModel.__init__(self, config)  # the stock constructor would build a stock backbone first
        self.model = self.backbone_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        output_head_router_scores: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CrossheadCausalLMOutput:
        """Return logits and, with `labels`, the loss, auxiliary losses included."""
        if output_head_router_scores is None:
            output_head_router_scores = getattr(self.config, "output_head_router_scores", False)
        cache = kwargs.pop(CACHE, past_key_values)
        recorded = self.model.record_outputs() if labels is not None or output_head_router_scores else []
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **{CACHE: cache, **{f"output_{name}": True for name in recorded}},
            **kwargs,
        )
        slice_indices = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, slice_indices, :])
        if missing := [name for name in recorded if not outputs.get(name)]:
            raise RuntimeError(
                f"{type(self.model).__name__} recorded no {missing[0]}, so an auxiliary loss would be missing: "
                "shard or wrap the decoder layers and the whole model, not the backbone in between"
            )
        tokens = 0 if cache is None else outputs.last_hidden_state.shape[1]  # [-0:] is the whole mask
        mask = attention_mask[:, -tokens:] if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2 else None
        return CrossheadCausalLMOutput(
            **{CACHE: outputs.get(CACHE), **self._losses(outputs, logits, labels, mask, kwargs)},
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.get("router_logits"),
            head_router_scores=outputs.get("head_router_scores") if output_head_router_scores else None,
        )

    def _losses(self, outputs: Any, logits: Any, labels: Any, attention_mask: Any, kwargs: Any) -> dict[str, Any]:
        """Return the losses by output field; `loss` is their weighted sum, or None without labels."""
        losses: dict[str, Any] = {"loss": None}
        if labels is not None:
            losses["loss"] = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        for name, value, weight in self._auxiliary_losses(outputs, attention_mask):
            losses[name] = value
            if labels is not None:
                share = weight * share_of_batch(labels, kwargs)
                losses["loss"] = losses["loss"] + share * value.to(losses["loss"].device)
        return losses

    def _get_static_cache_init_shape(self) -> Any:
        # transformers would preallocate the stock model's heads, but mechanisms cache other shapes.
        return None if self.config.mixers else super()._get_static_cache_init_shape()  # type: ignore[misc]

    def init_continuous_batching(self, *arguments: Any, **options: Any) -> Any:
        """Refuse mechanisms that replace attention, because `generate_batch` updates its cache in stock attention."""
        if replacing := [name for name in self.config.mechanisms() if MECHANISMS[name].rules.replaces_attention]:
            raise ValueError(f"continuous batching cannot run {replacing[0]!r}: use generate()")
        return super().init_continuous_batching(*arguments, **options)  # type: ignore[misc]


class CrossheadClassifier(CrossheadPreTrained):
    """Sequence classifier over a crosshead backbone, without auxiliary losses, like the stock one of Qwen3-MoE."""

    def __init__(self, config: Any) -> None:
        self._check_config(config)
        PreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = self.backbone_class(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()
