"""The part that encoders add: task heads whose loss includes the losses of mechanisms."""

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
from .mechanisms.base import AuxiliaryLoss, package_only
from .model import CrossheadPreTrained

ENCODER_CLASSES = {
    "AutoModel": "Model",
    "AutoModelForMaskedLM": "ForMaskedLM",
    "AutoModelForSequenceClassification": "ForSequenceClassification",
    "AutoModelForTokenClassification": "ForTokenClassification",
    "AutoModelForQuestionAnswering": "ForQuestionAnswering",
    "AutoModelForPreTraining": "ForPreTraining",
}
"""The Auto classes of text encoders -> the ending of our class's name."""
IMAGE_CLASSES = {"AutoModel": "Model", "AutoModelForImageClassification": "ForImageClassification"}
"""The same of vision transformers."""
ENCODER_FIELDS = {
    "num_key_value_heads": "num_attention_heads",
    "attention_dropout": "attention_probs_dropout_prob",
    "rms_norm_eps": "layer_norm_eps",
}
"""The fields of decoders that `MixersConfig` reads -> those of BERT and its descendants."""


@package_only
def image_shape(config: Any) -> tuple[int, int, int]:
    """Channels, height and width of the images of a vision transformer."""
    size = config.image_size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return config.num_channels, height, width


def alias(name: str) -> Any:
    """A property that gives a projection the name used by the attention forward; checkpoints use `name`."""
    # An attrgetter would break the compiled graph.
    return property(lambda module: reduce(getattr, name.split("."), module))


class IndexedAttention(nn.Module):
    """Gives an index to a stock attention class that takes the config alone."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config)
        self.layer_idx = layer_idx


class EncoderAttention(CrossheadAttention):
    """Attention in layers that pass the mask as second argument."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attention outputs (B, T, hidden), and the attention weights where the implementation returns them."""
        return super().forward(hidden_states, attention_mask=attention_mask, **kwargs)


@dataclass
class RouterOutput(ModelOutput):
    """What the head routers of a model did."""

    balance_loss: Tensor | None = None
    """Before its weight; mean over the layers that route."""
    head_router_scores: tuple[Tensor, ...] | None = None
    """Per routing layer, each routed head's probability: (B, T, routed heads)."""


@dataclass
class CrossheadMaskedLMOutput(RouterOutput, MaskedLMOutput):
    """A masked language model's output, and what its head routers did."""


@dataclass
class CrossheadImageClassifierOutput(RouterOutput, ImageClassifierOutput):
    """An image classifier's output, and what its head routers did."""


@dataclass
class CrossheadSequenceClassifierOutput(RouterOutput, SequenceClassifierOutput):
    """A sequence classifier's output, and what its head routers did."""


@dataclass
class CrossheadTokenClassifierOutput(RouterOutput, TokenClassifierOutput):
    """A token classifier's output, and what its head routers did."""


@dataclass
class CrossheadQuestionAnsweringOutput(RouterOutput, QuestionAnsweringModelOutput):
    """A question answering model's output, and what its head routers did."""


@dataclass
class CrossheadSeq2SeqModelOutput(RouterOutput, Seq2SeqModelOutput):
    """The output of an encoder and a decoder, and what their head routers did."""


@dataclass
class CrossheadSeq2SeqLMOutput(RouterOutput, Seq2SeqLMOutput):
    """A sequence-to-sequence language model's output, and what its head routers did."""


def recording_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A stock backbone's forward that also appends itself, its output and its mask to `backbone_outputs`."""

    @wraps(forward)
    def record(self: Any, *inputs: Any, backbone_outputs: list[Any] | None = None, **kwargs: Any) -> Any:
        if backbone_outputs is not None:
            self.record_outputs()
        outputs = forward(self, *inputs, **kwargs)
        if backbone_outputs is not None:
            mask, tokens = kwargs.get("attention_mask"), outputs[0].shape[1]
            mask = mask[:, -tokens:] if isinstance(mask, Tensor) and mask.ndim == 2 else mask  # losses know no past
            backbone_outputs.append((self, outputs, mask))
        return outputs

    return record


def task_forward(forward: Callable[..., Any], output_class: type[RouterOutput]) -> Callable[..., Any]:
    """A stock task head's forward whose loss includes the losses of mechanisms."""

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
            scores = [of_backbone.get("head_router_scores") or () for _, of_backbone, _ in backbone_outputs]
            outputs.head_router_scores = tuple(chain.from_iterable(scores)) or None
        return outputs

    return with_losses


def _add_losses(outputs: Any, backbone_outputs: list[Any]) -> None:
    """Add the losses of mechanisms: of an encoder and a decoder, their mean."""
    losses: dict[str, list[AuxiliaryLoss]] = {}
    for backbone, of_backbone, attention_mask in backbone_outputs:
        for each in backbone._auxiliary_losses(of_backbone, attention_mask):
            losses.setdefault(each.name, []).append(each)
    for name, parts in losses.items():
        outputs[name] = torch.stack([part.value.to(parts[0].value.device) for part in parts]).mean()
        if outputs.get("loss") is not None:
            outputs.loss = outputs.loss + parts[0].weight * outputs[name].to(outputs.loss.device)


class CrossheadTask(CrossheadPreTrained):
    """A stock task head over our backbone."""

    accepts_loss_kwargs = False  # like the stock heads: a loss is the mean over its own call
    base_model_prefix: str

    def __init__(self, config: Any) -> None:
        self._check_config(config)
        super().__init__(config)

    def post_init(self) -> None:
        """Replace the backbone before the initial values are set."""
        stock = getattr(self, self.base_model_prefix)
        if any(getattr(module, "gradient_checkpointing", False) for module in stock.modules()):
            # The stock backbone has removed the field from the config.
            self.config.gradient_checkpointing = True
        options = {"add_pooling_layer": stock.pooler is not None} if hasattr(stock, "pooler") else {}
        ours = self.backbone_class(self.config, **options)
        setattr(self, self.base_model_prefix, ours)
        super().post_init()
