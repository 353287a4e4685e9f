"""Objectives on text: next token, masked tokens (with the order of segments), and span corruption."""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from crosshead.common.errors import RecipeError
from crosshead.common.progress import Progress

from ..data.corruption import Corruption, cut_spans, masked_tokens, span_sizes
from ..data.training_data import TrainingData, open_data
from ..schema.recipe import Recipe
from .load_balance import HeadRouting
from .loading import initial_config, load_tokenizer
from .objective import LABELS, LOSS, ORDER_LABELS, Objective, Predictions, Scores, count_predictions

ORDER_LOGITS = ("sop_logits", "seq_relationship_logits")
"""Output of the segment-order head in ALBERT and in BERT."""


def check_context(recipe: Recipe, config: Any) -> None:
    """Raise `RecipeError` if a window is longer than the model's context."""
    length, context = recipe.data.length, getattr(config, "max_position_embeddings", None)
    if context is not None and length > context:
        raise RecipeError(f"data.length={length} is more than max_position_embeddings={context}: lower it")


class TextObjective(Objective):
    """Base class of the objectives on text."""

    def load_processor(self) -> Any:
        """Load the tokenizer, after a check of the model's type: a model of images has none."""
        initial_config(self.recipe)
        return load_tokenizer(self.recipe)

    def complete_config(self, config: Any, processor: Any) -> None:
        """Set the ids of the special tokens."""
        config.bos_token_id, config.eos_token_id = processor.bos_token_id, processor.eos_token_id

    def example(self, config: Any, rows: int) -> dict[str, Any]:
        """Return sequences of `data.length` tokens."""
        return {"input_ids": torch.zeros(rows, self.recipe.data.length, dtype=torch.long)}

    def logits(self, config: Any) -> int:
        """Return the number of logits of all tokens in a window."""
        return int(self.recipe.data.length * config.vocab_size)


def excess_expert_loss(model: nn.Module, outputs: Any, share: torch.Tensor) -> torch.Tensor | float:
    """Return the part of a stock MoE model's load-balancing loss that exceeds the micro batch's share of the step.

    A stock model adds the whole loss for each micro batch; crosshead models add only their share.
    """
    config: Any = getattr(model, "module", model).config
    if outputs.get("aux_loss") is None or hasattr(config, "mixers"):
        return 0.0
    return config.router_aux_loss_coef * outputs["aux_loss"] * (1 - share)


class NextToken(TextObjective):
    """A decoder predicts the next token; the model itself computes the loss, with the balance loss of experts."""

    def open_data(self, processor: Any, config: Any, progress: Progress) -> TrainingData:
        """Open windows of text, which must fit into the model's context."""
        check_context(self.recipe, config)
        return open_data(self.recipe.data, processor, config.vocab_size, progress)

    def predictions(self, outputs: Any, inputs: dict[str, Any]) -> list[Predictions]:
        """Return the predictions of all tokens but the first."""
        return [Predictions("", outputs["logits"][:, :-1], inputs[LABELS][:, 1:])]

    def check_losses(self, mechanisms: Iterable[str]) -> None:
        """Allow all mechanisms: the model's own loss has all auxiliary losses."""

    def loss(
        self, model: nn.Module, inputs: dict[str, Any], items: Any, routing: HeadRouting | None
    ) -> tuple[torch.Tensor, Any]:
        """Return the model's own loss, with head balance losses per sequence instead of over the micro batch."""
        inputs = inputs | {"num_items_in_batch": items, "use_cache": False}  # a cache lets attention cross documents
        shares = count_predictions(inputs[LABELS]) / items
        if routing is None:
            outputs = model(**inputs)
            return outputs["loss"] - excess_expert_loss(model, outputs, shares.sum()), outputs
        outputs = model(**inputs, output_head_router_scores=True)
        of_all_tokens = routing.weight * outputs["balance_loss"] * shares.sum()
        return outputs["loss"] + (routing.loss_by_sequence(outputs, shares) - of_all_tokens), outputs

    def evaluate(self, model: nn.Module, inputs: dict[str, Any]) -> Scores:
        """Return the loss, without the accuracy."""
        return {LOSS: super().evaluate(model, inputs)[LOSS]}

    def model_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs of the model, without a cache, with which attention would cross documents."""
        return super().model_inputs(inputs) | {"use_cache": False}


class CorruptionObjective(TextObjective):
    """Base class of objectives that predict the original of a corrupted text."""

    @abstractmethod
    def corruption(self, tokenizer: Any, config: Any) -> Corruption:
        """Return the corruption of each window."""

    def complete_config(self, config: Any, processor: Any) -> None:
        """Set the ids of the special tokens; a decoder starts with the padding token by default, as in T5."""
        super().complete_config(config, processor)
        config.pad_token_id = processor.pad_token_id
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = processor.pad_token_id

    def open_data(self, processor: Any, config: Any, progress: Progress) -> TrainingData:
        """Open windows that fit `data.length` after the corruption, which is the same in each evaluation."""
        corruption = self.corruption(processor, config)
        windows = replace(self.recipe.data, length=corruption.text_length)
        return open_data(windows, processor, config.vocab_size, progress).prepared(corruption, corruption)


class MaskedTokens(CorruptionObjective):
    """An encoder predicts masked tokens and, with a second head, the order of two segments."""

    def corruption(self, tokenizer: Any, config: Any) -> Corruption:
        """Return the masking, with special tokens around one or two segments."""
        check_context(self.recipe, config)
        if self.options.segments == "order" and getattr(config, "type_vocab_size", 0) < 2:
            raise RecipeError(
                f"objective.segments='order' needs a model with 2 types of tokens, but type_vocab_size="
                f"{getattr(config, 'type_vocab_size', None)}: raise it, or use segments: none"
            )
        return masked_tokens(self.options, tokenizer, config.vocab_size, self.recipe.data.length)

    def predictions(self, outputs: Any, inputs: dict[str, Any]) -> list[Predictions]:
        """Return the predictions of masked tokens and, with two segments, of their order."""
        if ORDER_LABELS not in inputs:
            return super().predictions(outputs, inputs)
        order = next(outputs[name] for name in ORDER_LOGITS if name in outputs)
        return [
            Predictions("", outputs["prediction_logits"], inputs[LABELS]),
            Predictions("order_", order, inputs[ORDER_LABELS]),
        ]


class Spans(CorruptionObjective):
    """Span corruption: an encoder reads a text without some spans, and a decoder predicts the spans."""

    def corruption(self, tokenizer: Any, config: Any) -> Corruption:
        """Return the span corruption."""
        start = getattr(config, "decoder_start_token_id", None)
        if start is None:
            start = tokenizer.pad_token_id
        if start is None:
            raise RecipeError(
                "the model has no decoder_start_token_id, nor its tokenizer a pad_token: set one of them"
            )
        return cut_spans(self.options, tokenizer, config.vocab_size, self.recipe.data.length, start)

    def example(self, config: Any, rows: int) -> dict[str, Any]:
        """Return inputs of the encoder and of the decoder."""
        shapes = {"input_ids": self.recipe.data.length, "decoder_input_ids": self._targets()}
        zeros = {name: torch.zeros(rows, size, dtype=torch.long) for name, size in shapes.items()}
        return self.model_inputs(zeros)

    def logits(self, config: Any) -> int:
        """Return the number of logits of all decoder tokens of a sample."""
        return int(self._targets() * config.vocab_size)

    def _targets(self) -> int:
        """Return the number of decoder tokens of a sample."""
        _, noise, spans = span_sizes(self.options, self.recipe.data.length)
        return noise + spans + 1

    def model_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs of the model, without a cache."""
        return super().model_inputs(inputs) | {"use_cache": False}
