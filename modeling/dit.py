"""DiT, the diffusion transformer of diffusers, with mechanisms in its attention.

In diffusers, an attention layer calls an attention processor. Here, the processor of each block is an `nn.Module` that
holds the block's mechanisms, so that their parameters are trained, averaged (EMA) and saved with the model.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration import complete_mixers, layer_settings, shared_layout
from .mechanisms import MECHANISMS
from .mechanisms.base import AttentionState, HeadLayout, ParameterModule, Settings, package_only
from .ops import split_heads
from .options import refuse

try:
    from diffusers import ConfigMixin, DiTTransformer2DModel
    from diffusers.models.modeling_outputs import Transformer2DModelOutput
except ImportError as error:
    raise ImportError(f"DiT needs diffusers ({error}): pip install 'crosshead[diffusion]'") from error

ACCEPTED = ("mixture", "knocking", "gating")
"""Mechanisms that DiT can have: they change neither projections nor attention weights."""
REFUSED = {
    **dict.fromkeys(("explicit", "differential", "bilinear"), "it changes the projections of attention"),
    "talking": "its code registers an operator, and diffusers runs the code of a saved model again each time",
}
"""Mechanism that DiT refuses -> the reason."""
CODE = "modeling_crosshead"
"""Name of the code file in a saved model's folder, without its suffix."""
MODEL = "CrossheadDiTTransformer2DModel"
ROUTER_STD = 0.02
"""Standard deviation of the random initial weights of mechanisms, as in vision transformers."""


@dataclass
class CrossheadDiTOutput(Transformer2DModelOutput):  # type: ignore[misc]
    """Output of DiT, with auxiliary losses while gradients are recorded."""

    auxiliary_loss: Tensor | None = None
    """Weighted sum of the auxiliary losses, 0 without any: a training loop adds it to the denoising loss."""
    balance_loss: Tensor | None = None
    """Balance loss before its weight, mean over the routing layers."""
    head_router_scores: tuple[Tensor, ...] | None = None
    """If requested, probability of each routed head: one tensor (B, T, routed heads) per routing layer."""


class CrossheadAttnProcessor(nn.Module):
    """An attention processor that holds the mechanisms of one block."""

    is_causal = False

    def __init__(self, layout: HeadLayout, settings: Mapping[str, Settings]) -> None:
        super().__init__()
        self.mixers = nn.ModuleDict({name: MECHANISMS[name](layout, options) for name, options in settings.items()})
        self.head_dim = layout.head_dim
        for module in self.modules():
            if isinstance(module, ParameterModule):
                module.initialise(ROUTER_STD)

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        head_router_scores: list[Tensor] | None = None,
    ) -> Tensor:
        """Return attention outputs (B, T, hidden); append the router's probabilities to `head_router_scores`.

        As in diffusers' processors, `attn` has the projections, and passes the arguments that this signature names.
        """
        if encoder_hidden_states is not None or attention_mask is not None:
            raise ValueError("DiT has self-attention without a mask: pass hidden_states alone")
        layer: Any = attn
        query, key, value = (
            split_heads(project(hidden_states), self.head_dim) for project in (layer.to_q, layer.to_k, layer.to_v)
        )
        state = AttentionState(hidden_states, hidden_states, query, key, value)
        output = self._attention(state)
        if head_router_scores is not None and state.router_scores is not None:
            head_router_scores.append(state.router_scores)
        projection, dropout = layer.to_out
        return dropout(projection(output.flatten(-2)))

    def _attention(self, state: AttentionState) -> Tensor:
        """Return head outputs (B, T, heads, features), calling the hooks of the mechanisms."""
        mechanisms: list[Any] = list(self.mixers.values())
        for mechanism in mechanisms:
            mechanism.before_rope(state)
        for mechanism in mechanisms:
            state.function = state.function or mechanism.attention_function(state, "sdpa", masked=False)
        attention = ALL_ATTENTION_FUNCTIONS[state.function or "sdpa"]
        scaling = 1 / math.sqrt(self.head_dim)  # bit for bit the default of stock processors
        tensors = (state.query, state.key, state.value, None)
        output, _ = attention(self, *tensors, dropout=0.0, scaling=scaling, **state.attention_kwargs)
        for mechanism in mechanisms:
            output = mechanism.head_outputs(output, state)
        return output


def refuse_processor(processor: Any) -> None:
    """Replace `set_processor` by an error: another processor would drop the block's mechanisms."""
    raise ValueError(
        f"set_processor({type(processor).__name__}) is not allowed: it would drop the mechanisms, which the processor "
        "of the block holds; attention slicing, xformers and fused projections are not for this model"
    )


class SavedWithCode(ConfigMixin):  # type: ignore[misc]
    """Mixin that saves a model with the code that loads it."""

    def write_code(self, directory: Path) -> None:
        """Write the code file: a copy of this file."""
        (directory / f"{CODE}.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")

    @classmethod
    def extract_init_dict(cls, config_dict: Mapping[str, Any], **kwargs: Any) -> Any:
        """Return the constructor's arguments in a config, without `auto_map`, which only the code loader reads."""
        return super().extract_init_dict({k: v for k, v in config_dict.items() if k != "auto_map"}, **kwargs)

    def to_json_string(self) -> str:
        """Return JSON with sorted keys, except in `mixers`, whose order is that of the mechanisms."""
        content = json.loads(super().to_json_string())
        content |= {"auto_map": {"AutoModel": f"{CODE}.{MODEL}"}, "mixers": self.config["mixers"]}
        return json.dumps(content, indent=2) + "\n"


def _with_mixers(init: Any) -> Signature:
    """Return a stock constructor's signature plus `mixers`: diffusers reads the config's fields from it."""
    stock = signature(init)
    return stock.replace(
        parameters=[*stock.parameters.values(), Parameter("mixers", Parameter.KEYWORD_ONLY, default=None)]
    )


class CrossheadDiTTransformer2DModel(SavedWithCode, DiTTransformer2DModel):  # type: ignore[misc]
    """`DiTTransformer2DModel` plus `mixers`: mechanism -> options."""

    def __init__(self, *arguments: Any, mixers: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for name, reason in REFUSED.items():
            if isinstance(mixers, Mapping) and name in mixers:
                raise refuse(f"mixers.{name}", mixers[name], f"{reason}; DiT takes {', '.join(map(repr, ACCEPTED))}")
        complete = complete_mixers({} if mixers is None else mixers, self.layouts())
        self.register_to_config(mixers=complete)
        for layout, block in zip(self.layouts(), self.transformer_blocks, strict=True):
            settings = layer_settings(complete, layout.layer_index)
            block.attn1.set_processor(CrossheadAttnProcessor(shared_layout(settings, layout), settings))
            block.attn1.set_processor = refuse_processor
        # A pipeline writes this into model_index.json as the name of the code file in the model's folder.
        self.__module__ = CODE

    __init__.__signature__ = _with_mixers(DiTTransformer2DModel.__init__)  # type: ignore[attr-defined]

    @property
    def mixers(self) -> dict[str, Settings]:
        """The mechanisms of any block, with their complete options."""
        return dict(self.config.mixers)

    def layouts(self) -> list[HeadLayout]:
        """Return the attention layout of every block."""
        heads, size = self.config.num_attention_heads, self.config.attention_head_dim
        blocks = range(self.config.num_layers)
        return [HeadLayout(heads * size, heads, heads, size, layer_index=block) for block in blocks]

    def mixers_of_layer(self, layer: int) -> dict[str, Settings]:
        """Return the mechanisms of one block with their complete options, in the order in which they run."""
        return layer_settings(self.mixers, layer)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        """Load a model. Mechanisms missing from the checkpoint, such as a stock one, get their initial values."""
        try:
            model, info = super().from_pretrained(pretrained_model_name_or_path, output_loading_info=True, **kwargs)
        except NotImplementedError as error:
            if "meta tensor" not in str(error):
                raise
            reason = "the checkpoint does not hold all mechanisms; load without it, then move the model"
            raise refuse("device_map", kwargs.get("device_map"), reason) from error
        owners = {name.rpartition(".")[0] for name in info.get("missing_keys", [])}
        for name, module in model.named_modules():
            if name in owners and isinstance(module, ParameterModule):
                module.to_empty(device=model.device).initialise(ROUTER_STD)
        return (model, info) if output_loading_info else model

    @package_only
    def write_code(self, directory: Path) -> None:
        """Write the code file: the part of crosshead that the model needs."""
        from .bundle import Bundle

        bundle = Bundle("dit", MODEL, ACCEPTED)
        text = bundle.text(bundle.closure([MODEL]), f"DiT with {', '.join(ACCEPTED)}")
        (directory / f"{CODE}.py").write_text(text, encoding="utf-8")

    def save_config(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save config.json and the code file."""
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        self.write_code(Path(save_directory))
        super().save_config(save_directory, push_to_hub, **kwargs)

    @classmethod
    def from_transformer(cls, transformer: DiTTransformer2DModel, mixers: Mapping[str, Any]) -> Self:
        """Return a copy of a stock model with mechanisms added, on its device, in its dtype and training mode."""
        if not isinstance(transformer, DiTTransformer2DModel) or "mixers" in transformer.config:
            raise TypeError(
                f"from_transformer takes a stock DiTTransformer2DModel, not a {type(transformer).__name__}"
            )
        model = cls.from_config(transformer.config, mixers=mixers)
        nn.Module.to(model, transformer.device, transformer.dtype)  # diffusers' own `to` warns about every dtype
        model.load_state_dict(model.state_dict() | transformer.state_dict())
        return model.train(transformer.training)

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor | None = None,
        class_labels: Tensor | None = None,
        cross_attention_kwargs: dict[str, Any] | None = None,
        return_dict: bool = True,
        output_head_router_scores: bool = False,
    ) -> CrossheadDiTOutput | tuple[Tensor]:
        """Return the prediction for noisy latents (B, channels, size, size), with losses if gradients are recorded."""
        scores: list[Tensor] = []
        if torch.is_grad_enabled() or output_head_router_scores:
            cross_attention_kwargs = {**(cross_attention_kwargs or {}), "head_router_scores": scores}
        (sample,) = super().forward(hidden_states, timestep, class_labels, cross_attention_kwargs, return_dict=False)
        if not return_dict:
            return (sample,)
        output = CrossheadDiTOutput(sample=sample)
        if torch.is_grad_enabled():
            self._check_gradients(scores)
            self._add_losses(output, scores)
        if output_head_router_scores:
            output["head_router_scores"] = tuple(scores)
        return output

    def mechanisms(self) -> Mapping[str, Settings]:
        """Return the mechanisms of any block, with their options for the whole model."""
        return self.mixers

    def _add_losses(self, output: CrossheadDiTOutput, scores: list[Tensor]) -> None:
        recorded, total = {"head_router_scores": scores}, output.sample.new_zeros((), dtype=torch.float32)
        for name in self.mixers:
            if (loss := MECHANISMS[name].auxiliary_loss(recorded, self, None)) is not None:
                output[loss.name] = loss.value
                total = total + loss.weight * loss.value
        output["auxiliary_loss"] = total

    def _check_gradients(self, scores: list[Tensor]) -> None:
        """Raise if the scores have no gradient: reentrant checkpointing runs blocks without gradients first."""
        if self.gradient_checkpointing and scores and not any(score.requires_grad for score in scores):
            layers: list[Any] = [block.attn1 for block in self.transformer_blocks]
            routers = [*(layer.processor for layer in layers), *(layer.to_q for layer in layers)]
            if any(parameter.requires_grad for router in routers for parameter in router.parameters()):
                raise ValueError(
                    "use_reentrant=True is not allowed: it drops the gradient of the balance loss; "
                    "use enable_gradient_checkpointing() as it is"
                )
