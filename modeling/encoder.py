"""Classes for encoders: task heads whose loss includes the auxiliary losses of mechanisms."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce, wraps
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import (
    ImageClassifierOutput,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import ModelOutput, can_return_tuple

from .attention import CrossheadAttention
from .mechanisms.base import AuxiliaryLoss
from .model import CrossheadPreTrained

ENCODER_CLASSES = {
    "AutoModel": "Model",
    "AutoModelForMaskedLM": "ForMaskedLM",
    "AutoModelForSequenceClassification": "ForSequenceClassification",
    "AutoModelForTokenClassification": "ForTokenClassification",
    "AutoModelForQuestionAnswering": "ForQuestionAnswering",
    "AutoModelForPreTraining": "ForPreTraining",
}
"""Auto class of text encoders -> suffix of the class that it loads, after `class_prefix`."""
IMAGE_CLASSES = {"AutoModel": "Model", "AutoModelForImageClassification": "ForImageClassification"}
"""Auto class of vision transformers -> suffix of the class that it loads, after `class_prefix`."""
ENCODER_FIELDS = {
    "num_key_value_heads": "num_attention_heads",
    "attention_dropout": "attention_probs_dropout_prob",
    "rms_norm_eps": "layer_norm_eps",
}
"""Config field that `MixersConfig` reads -> its name in configs of BERT and its descendants."""


def submodule_property(name: str) -> Any:
    """Return a property for the submodule `name`: the attention forward uses the property, checkpoints use `name`."""
    # `operator.attrgetter` would break the compiled graph.
    return property(lambda module: reduce(getattr, name.split("."), module))


class IndexedAttention(nn.Module):
    """Adds `layer_idx` to a stock attention class whose constructor takes the config alone."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config)
        self.layer_idx = layer_idx


class EncoderAttention(CrossheadAttention):
    """Attention for layers that pass the mask as the second positional argument."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return attention outputs (B, T, hidden), and attention weights, None if the implementation has none."""
        return super().forward(hidden_states, attention_mask=attention_mask, **kwargs)


@dataclass
class RouterOutput(ModelOutput):
    """Model output with the balance loss and the scores of head routers."""

    balance_loss: Tensor | None = None
    """Balance loss before its weight, mean over the routing layers."""
    head_router_scores: tuple[Tensor, ...] | None = None
    """Probability of each routed head: one tensor (B, T, routed heads) per routing layer."""


@dataclass
class CrossheadMaskedLMOutput(RouterOutput, MaskedLMOutput):
    """Output of a masked language model, with balance loss and head router scores."""


@dataclass
class CrossheadImageClassifierOutput(RouterOutput, ImageClassifierOutput):
    """Output of an image classifier, with balance loss and head router scores."""


@dataclass
class CrossheadSequenceClassifierOutput(RouterOutput, SequenceClassifierOutput):
    """Output of a sequence classifier, with balance loss and head router scores."""


@dataclass
class CrossheadTokenClassifierOutput(RouterOutput, TokenClassifierOutput):
    """Output of a token classifier, with balance loss and head router scores."""


@dataclass
class CrossheadQuestionAnsweringOutput(RouterOutput, QuestionAnsweringModelOutput):
    """Output of a question answering model, with balance loss and head router scores."""


@dataclass
class CrossheadSeq2SeqModelOutput(RouterOutput, Seq2SeqModelOutput):
    """Output of an encoder and a decoder, with balance loss and head router scores."""


@dataclass
class CrossheadSeq2SeqLMOutput(RouterOutput, Seq2SeqLMOutput):
    """Output of a sequence-to-sequence language model, with balance loss and head router scores."""


def recording_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a stock backbone's forward: append (backbone, output, mask) to the list `backbone_outputs`, if passed."""

    @wraps(forward)
    def record(self: Any, *inputs: Any, backbone_outputs: list[Any] | None = None, **kwargs: Any) -> Any:
        if backbone_outputs is not None:
            self.record_outputs()
        outputs = forward(self, *inputs, **kwargs)
        if backbone_outputs is not None:
            mask, tokens = kwargs.get("attention_mask"), outputs[0].shape[1]
            mask = mask[:, -tokens:] if isinstance(mask, Tensor) and mask.ndim == 2 else mask  # drops the past
            backbone_outputs.append((self, outputs, mask))
        return outputs

    return record


def task_forward(forward: Callable[..., Any], output_class: type[RouterOutput]) -> Callable[..., Any]:
    """Wrap a stock task head's forward: its loss includes the auxiliary losses of mechanisms."""

    @can_return_tuple
    @wraps(forward)
    def with_losses(self: Any, *inputs: Any, output_head_router_scores: bool | None = None, **kwargs: Any) -> Any:
        if output_head_router_scores is None:
            output_head_router_scores = getattr(self.config, "output_head_router_scores", False)
        recorded = {f"output_{name}": True for name in self._recorded()}
        backbone_outputs: list[Any] = []
        kwargs = {**kwargs, **recorded, "backbone_outputs": backbone_outputs, "return_dict": True}
        outputs: Any = output_class(**forward(self, *inputs, **kwargs))
        if outputs.get("loss") is not None or output_head_router_scores:
            _add_losses(outputs, backbone_outputs)
        if output_head_router_scores:
            scores = [output.get("head_router_scores") or () for _, output, _ in backbone_outputs]
            outputs.head_router_scores = tuple(chain.from_iterable(scores)) or None
        return outputs

    return with_losses


def _add_losses(outputs: Any, backbone_outputs: list[Any]) -> None:
    """Add the auxiliary losses, each the mean over encoder and decoder if there are both, to the output."""
    losses: dict[str, list[AuxiliaryLoss]] = {}
    for backbone, output, attention_mask in backbone_outputs:
        for loss in backbone._auxiliary_losses(output, attention_mask):
            losses.setdefault(loss.name, []).append(loss)
    for name, parts in losses.items():
        outputs[name] = torch.stack([part.value.to(parts[0].value.device) for part in parts]).mean()
        if outputs.get("loss") is not None:
            outputs.loss = outputs.loss + parts[0].weight * outputs[name].to(outputs.loss.device)


class CrossheadTask(CrossheadPreTrained):
    """A stock task head over a crosshead backbone."""

    accepts_loss_kwargs = False  # like the stock heads, whose loss is the mean over one call
    base_model_prefix: str

    def __init__(self, config: Any) -> None:
        self._check_config(config)
        super().__init__(config)

    def post_init(self) -> None:
        """Replace the stock backbone by the crosshead one before weights are initialised."""
        stock = getattr(self, self.base_model_prefix)
        if any(getattr(module, "gradient_checkpointing", False) for module in stock.modules()):
            # The stock backbone's constructor has removed this field from the config.
            self.config.gradient_checkpointing = True
        options = {"add_pooling_layer": stock.pooler is not None} if hasattr(stock, "pooler") else {}
        backbone = self.backbone_class(self.config, **options)
        setattr(self, self.base_model_prefix, backbone)
        super().post_init()
