"""The model families that can be converted, and the tensors of a checkpoint of each family.

Facts are tables: the name of a tensor, its shape, and the condition under which it exists. An additional tensor in a
checkpoint is an error, unless `IGNORED` names it.
"""

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from crosshead.common.checked_json import shown
from crosshead.common.errors import ConversionError, one_line
from crosshead.modeling.backbones.llama import CrossheadLlamaConfig
from crosshead.modeling.backbones.qwen2 import CrossheadQwen2Config
from crosshead.modeling.backbones.qwen3 import CrossheadQwen3Config
from crosshead.modeling.backbones.qwen3_moe import CrossheadQwen3MoeConfig
from crosshead.modeling.options import is_whole

Condition = Callable[[Any], bool]
"""A property of a config."""


@dataclass(frozen=True)
class Family:
    """A stock family and its crosshead counterpart."""

    stock: type[PreTrainedConfig]
    mixed: type[Any]
    """The config class with mechanisms."""
    architecture: str
    """The stock class of the language model."""
    qkv_bias: Condition = attrgetter("attention_bias")
    output_bias: Condition = attrgetter("attention_bias")
    mlp_bias: Condition = lambda config: False
    key_norm: bool = False
    experts: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family(LlamaConfig, CrossheadLlamaConfig, "LlamaForCausalLM", mlp_bias=attrgetter("mlp_bias")),
    "qwen2": Family(
        Qwen2Config,
        CrossheadQwen2Config,
        "Qwen2ForCausalLM",
        qkv_bias=lambda config: True,
        output_bias=lambda config: False,
    ),
    "qwen3": Family(Qwen3Config, CrossheadQwen3Config, "Qwen3ForCausalLM", key_norm=True),
    "qwen3_moe": Family(Qwen3MoeConfig, CrossheadQwen3MoeConfig, "Qwen3MoeForCausalLM", key_norm=True, experts=True),
}
"""The stock `model_type` -> its family."""
PREFIX = "crosshead_"
_MAX_SIZE = 10**9
MAX_COUNTS = {
    "num_hidden_layers": 1_000,
    "num_attention_heads": 10_000,
    "num_key_value_heads": 10_000,
    "num_experts": 10_000,
    "num_local_experts": 10_000,
    "num_experts_per_tok": 10_000,
    "decoder_sparse_step": _MAX_SIZE,
    "hidden_size": _MAX_SIZE,
    "intermediate_size": _MAX_SIZE,
    "moe_intermediate_size": _MAX_SIZE,
    "head_dim": _MAX_SIZE,
    "vocab_size": _MAX_SIZE,
    "max_position_embeddings": _MAX_SIZE,
    "num_labels": 10_000,
}
"""Integer fields of a config -> their maximum: a damaged value must not exhaust the memory."""
MAX_EXPERTS = 100_000
"""Of all layers together."""
IGNORED = {
    re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"): "computed from the config",
}
"""Names of tensors that may be dropped -> the reason."""
FUSED_EXPERTS = re.compile(r"model\.layers\.\d+\.mlp\.experts\.(gate_up|down)_proj")
"""Names of tensors with all experts of a layer, which transformers saves with `save_original_format=False`."""
Shapes = dict[str, tuple[int, ...]]


def family_of(config: Any) -> Family:
    """The family of a stock or crosshead config."""
    return FAMILIES[config.model_type.removeprefix(PREFIX)]


def layer_prefix(layer: int) -> str:
    """The prefix of the names of one layer's tensors."""
    return f"model.layers.{layer}."


def attention_prefix(layer: int) -> str:
    """The prefix of the names of one layer's attention tensors."""
    return f"{layer_prefix(layer)}self_attn."


def stock_shapes(config: Any) -> Shapes:
    """The names and shapes of a stock checkpoint's tensors; mechanisms of a crosshead config are ignored."""
    hidden, vocabulary = config.hidden_size, config.vocab_size
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(config.num_hidden_layers):
        shapes |= {layer_prefix(layer) + name: shape for name, shape in _layer_shapes(config, layer)}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (vocabulary, hidden)
    return shapes


def _layer_shapes(config: Any, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = config.hidden_size
    yield "input_layernorm.weight", (hidden,)
    yield from _attention_shapes(config)
    yield "post_attention_layernorm.weight", (hidden,)
    if _is_sparse(config, layer):
        yield "mlp.gate.weight", (config.num_experts, hidden)
        for expert in range(config.num_experts):
            yield from _mlp_shapes(f"mlp.experts.{expert}.", hidden, config.moe_intermediate_size, bias=False)
    else:
        yield from _mlp_shapes("mlp.", hidden, config.intermediate_size, family_of(config).mlp_bias(config))


def _attention_shapes(config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    family, hidden = family_of(config), config.hidden_size
    size = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield f"self_attn.{name}.weight", (rows, hidden)
        if family.qkv_bias(config):
            yield f"self_attn.{name}.bias", (rows,)
    yield "self_attn.o_proj.weight", (hidden, queries)
    if family.output_bias(config):
        yield "self_attn.o_proj.bias", (hidden,)
    if family.key_norm:
        yield "self_attn.q_norm.weight", (size,)
        yield "self_attn.k_norm.weight", (size,)


def _mlp_shapes(prefix: str, hidden: int, inner: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, shape in (("gate_proj", (inner, hidden)), ("up_proj", (inner, hidden)), ("down_proj", (hidden, inner))):
        yield f"{prefix}{name}.weight", shape
        if bias:
            yield f"{prefix}{name}.bias", shape[:1]


def _is_sparse(config: Any, layer: int) -> bool:
    if not family_of(config).experts or layer in config.mlp_only_layers:
        return False
    return (layer + 1) % config.decoder_sparse_step == 0


def ignored(name: str) -> str | None:
    """The reason why a tensor of this name may be dropped; None if it may not."""
    return next((reason for pattern, reason in IGNORED.items() if pattern.fullmatch(name)), None)


def kind_of(content: dict[str, Any]) -> str:
    """The kind of a configuration: "mixed" with mechanisms, else "stock"."""
    return "mixed" if str(content.get("model_type")).startswith(PREFIX) else "stock"


def read_config(content: dict[str, Any], kind: str, name: str) -> Any:
    """The checked configuration of a checkpoint; `kind` is "stock" or "mixed"."""
    model_type = content.get("model_type")
    allowed = [PREFIX * (kind == "mixed") + family for family in FAMILIES]
    if model_type not in allowed:
        raise ConversionError(_wrong_family(name, model_type, kind, allowed))
    if method := content.get("quantization_config"):
        method = method.get("quant_method", method) if isinstance(method, dict) else method
        raise ConversionError(
            f"{name} is quantised ({method!r}): convert the unquantised checkpoint, or dequantise it first"
        )
    family = FAMILIES[str(model_type).removeprefix(PREFIX)]
    _check_fields(content, family, f"config.json of {name}")
    if kind == "stock" and content.get("expert_bias"):
        raise ConversionError(
            f"config.json of {name} has expert_bias={shown(content['expert_bias'])}, but a stock router has no bias: "
            "remove the field"
        )
    try:
        config = (family.mixed if kind == "mixed" else family.stock).from_dict(content)
        with torch.device("meta"):  # some values are checked only when a model is created
            AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation="eager")
        return config
    except Exception as error:  # a config may contain anything, and transformers raises many types of errors
        raise ConversionError(f"config.json of {name} cannot be used: {one_line(error)}") from error


def check_plain(content: dict[str, Any], name: str) -> None:
    """`ConversionError` if a stock model has remote code, because its code may compute something else."""
    code = content.get("auto_map")
    if isinstance(code, dict):
        code = {key: value for key, value in code.items() if not key.startswith("AutoTokenizer")}
    if code:
        raise ConversionError(
            f"{name} has its own modeling code (auto_map={shown(code)}), which is not run: if it is a plain "
            f"{content['model_type']} model nevertheless, copy it and remove auto_map from config.json"
        )


def _check_fields(content: dict[str, Any], family: Family, where: str) -> None:
    """Check values that transformers does not check."""
    for field, maximum in MAX_COUNTS.items():
        value = content.get(field)
        if value is not None and not (is_whole(value) and 1 <= value <= maximum):
            raise ConversionError(f"{where} has {field}={shown(value)}: use an integer from 1 to {maximum}")
    layers = content.get("num_hidden_layers") or 1
    for field in ("num_experts", "num_local_experts"):
        if layers * (content.get(field) or 1) > MAX_EXPERTS:
            raise ConversionError(
                f"{where} has {field}={content[field]} in {layers} layers: at most {MAX_EXPERTS} experts are supported"
            )
    for field, value in content.items():
        if callable(getattr(family.mixed, field, None)):  # transformers would replace the method by the value
            raise ConversionError(f"{where} has {field}={shown(value)}: it is not a field of a config, remove it")


def _wrong_family(name: str, model_type: Any, kind: str, allowed: list[str]) -> str:
    given = f"{name} has model_type={model_type!r}"
    if kind == "stock" and isinstance(model_type, str) and model_type.startswith(PREFIX):
        return f"{given}, which already is a crosshead model: `crosshead fold` converts it back to a stock model"
    if kind == "mixed" and model_type in FAMILIES:
        return f"{given}, a stock model without mechanisms: `crosshead convert` adds mechanisms"
    return f"{given}, which cannot be converted: use a model of type {', '.join(allowed)}"
