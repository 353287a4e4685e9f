"""Training loss: loss of the objective with balance losses, and distillation from a teacher.

In the first steps of a distillation, the loss is the error of the model's attention outputs against the teacher's:
with the teacher's attention inputs in the transfer steps, and with the model's own inputs in the match steps.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from crosshead.modeling.model import IGNORED_LABEL

from ..schema.sections import Distillation
from .load_balance import HeadRouting
from .objective import Objective, count_predictions, next_labels
from .parameters import attention_layers
from .teacher_logits import INDICES, LOG_PROBS

ROWS = 512
"""Predictions per chunk, recomputed in the backward pass, since logits are the largest tensors of a step."""


class TrainingLoss:
    """The loss of a micro batch; the sum over all micro batches and processes is the loss of the step."""

    def __init__(
        self,
        objective: Objective,
        routing: HeadRouting | None,
        distillation: Distillation | None,
        teacher: nn.Module | None,
    ) -> None:
        self._objective, self._routing = objective, routing
        self._options, self._teacher = distillation, teacher
        self._handles: list[RemovableHandle] = []

    def __call__(self, model: nn.Module, inputs: dict[str, Any], items: Any, step: int) -> tuple[torch.Tensor, Any]:
        """Return the loss and the model's outputs; `items` is the number of predicted tokens in the whole step."""
        stored = tuple(inputs.pop(name) for name in (INDICES, LOG_PROBS) if name in inputs)
        if self._options is not None and step < self._options.transfer_steps + self._options.match_steps:
            return self._match(model, inputs, items, is_transfer_step=self.is_transfer_step(step))
        if self._options is None or self._options.weight == 0:
            return self._predict(model, inputs, items)
        teacher = stored or (self._run_teacher(inputs)["logits"],)
        loss, outputs = self._predict(model, inputs, items)
        difference = divergence_minus_loss(outputs["logits"], inputs["labels"], teacher, self._options.temperature)
        return loss + self._options.weight * difference / items, outputs

    def _predict(self, model: nn.Module, inputs: dict[str, Any], items: Any) -> tuple[torch.Tensor, Any]:
        """Return the objective's loss with the balance losses, and the outputs."""
        return self._objective.loss(model, inputs, items, self._routing)

    def is_transfer_step(self, step: int) -> bool:
        """Whether a step trains only attention layers, on the teacher's attention inputs (`transfer_steps`)."""
        return self._options is not None and step < self._options.transfer_steps

    def finish(self) -> None:
        """Remove the hooks that replace attention inputs; call it after the backward pass, which may rerun layers."""
        while self._handles:
            self._handles.pop().remove()

    def _match(
        self, model: nn.Module, inputs: dict[str, Any], items: Any, is_transfer_step: bool
    ) -> tuple[torch.Tensor, Any]:
        """Return the loss on attention outputs, and the outputs.

        The loss on predictions is added with factor 0, since data parallelism needs a gradient of every parameter.
        """
        teacher: Any = self._teacher
        with attention_states(teacher) as (teacher_inputs, teacher_outputs):
            self._run_teacher(inputs)
        if is_transfer_step:
            self._handles = replace_attention_inputs(model, teacher_inputs)
        with attention_states(model) as (_, model_outputs):
            loss, outputs = self._predict(model, inputs, items)
        shares = count_predictions(inputs["labels"]) / items
        return (attention_errors(model_outputs, teacher_outputs) * shares).sum() + 0.0 * loss, outputs

    @torch.no_grad()
    def _run_teacher(self, inputs: dict[str, Any]) -> Any:
        return self._teacher(**self._objective.model_inputs(inputs))  # type: ignore[misc]


def divergence_minus_loss(
    logits: torch.Tensor, labels: torch.Tensor, teacher: tuple[torch.Tensor, ...], temperature: float
) -> torch.Tensor:
    """Return the KL divergence from the teacher minus the next-token loss, summed over predictions.

    `teacher` contains the teacher's logits (B, T, vocabulary), or the token ids and log-probabilities of its k most
    probable tokens (B, T, k). The teacher's vocabulary may be a prefix of the model's.
    """
    parts = (tensor.flatten(0, 1).split(ROWS) for tensor in (next_labels(labels), logits, *teacher))
    recomputed = partial(checkpoint, _difference, use_reentrant=False, preserve_rng_state=False)
    total = logits.new_zeros((), dtype=torch.float32)
    for targets, model_logits, *teacher_chunk in zip(*parts, strict=True):
        total = total + recomputed(targets, model_logits, teacher_chunk, temperature)
    return total


def _difference(
    targets: torch.Tensor, logits: torch.Tensor, teacher: list[torch.Tensor], temperature: float
) -> torch.Tensor:
    plain = functional.log_softmax(logits.float(), dim=-1)
    if len(teacher) == 2:
        log_probs, teacher_log_probs = plain.gather(-1, teacher[0].long()), teacher[1].float()
        distance = _divergence(_add_rest(log_probs), _add_rest(teacher_log_probs))
    elif temperature == 1:
        distance = _divergence(plain, functional.log_softmax(teacher[0].float(), dim=-1))
    else:
        log_probs, teacher_log_probs = (
            functional.log_softmax(x.float() / temperature, dim=-1) for x in (logits, teacher[0])
        )
        distance = _divergence(log_probs, teacher_log_probs) * temperature**2  # keeps the gradient's scale
    likelihood = plain.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return (distance + likelihood)[targets != IGNORED_LABEL].sum()


def _divergence(log_probs: torch.Tensor, teacher_log_probs: torch.Tensor) -> torch.Tensor:
    """Return KL(teacher || model) of log-probabilities; the teacher's probability is 0 outside its vocabulary."""
    return (teacher_log_probs.exp() * (teacher_log_probs - log_probs[..., : teacher_log_probs.shape[-1]])).sum(-1)


def _add_rest(logarithms: torch.Tensor) -> torch.Tensor:
    """Append the log-probability of all other tokens together as one more outcome."""
    rest = 1 - logarithms.exp().sum(-1, keepdim=True)
    return torch.cat([logarithms, rest.clamp_min(torch.finfo(rest.dtype).eps).log()], dim=-1)


def attention_errors(outputs: list[torch.Tensor], teacher_outputs: list[torch.Tensor]) -> torch.Tensor:
    """Return the relative squared error of attention outputs (B, T, width) per sequence (B), averaged over layers."""
    errors = [
        (output.float() - teacher_output.float()).square().sum((1, 2))
        / teacher_output.float().square().sum((1, 2)).clamp_min(1e-12)
        for output, teacher_output in zip(outputs, teacher_outputs, strict=True)
    ]
    return torch.stack(errors).mean(0)


@contextmanager
def attention_states(model: nn.Module) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Yield lists that collect the inputs and outputs of attention, in layer order, during a forward pass."""
    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []

    def collect(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        inputs.append(kwargs["hidden_states"])
        outputs.append(output[0])

    with ExitStack() as stack:
        for layer in attention_layers(model):
            stack.enter_context(layer.register_forward_hook(collect, with_kwargs=True))
        yield inputs, outputs


def replace_attention_inputs(model: nn.Module, inputs: list[torch.Tensor]) -> list[RemovableHandle]:
    """Replace the inputs of each attention layer by the given ones, until the returned hooks are removed."""

    def replace(replacement: torch.Tensor, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        own = kwargs["hidden_states"]
        return args, kwargs | {"hidden_states": replacement.to(own) + 0.0 * own}  # DDP expects a gradient of `own`

    layers = zip(attention_layers(model), inputs, strict=True)
    return [
        layer.register_forward_pre_hook(partial(replace, replacement), with_kwargs=True)
        for layer, replacement in layers
    ]
