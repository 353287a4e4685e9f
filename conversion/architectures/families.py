"""The families that can be converted, and the tensors a checkpoint of each holds.

Facts as tables: a template of a name, the sizes of its shape, and the condition under which the family has it. What
a checkpoint holds beyond its table is an error, unless `IGNORED` says that it may be dropped and why.
"""

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Family:
    """A stock family and what it becomes."""

    stock: type[PreTrainedConfig]
    mixed: type[Any]
    architecture: str
    """The stock class of the language model."""
    qkv_bias: Condition
    output_bias: Condition
    mlp_bias: Condition
    key_norm: bool = False
    experts: bool = False


def _attention_bias(config: Any) -> bool:
    return bool(config.attention_bias)


def _mlp_bias(config: Any) -> bool:
    return bool(config.mlp_bias)


def _always(config: Any) -> bool:
    return True


def _never(config: Any) -> bool:
    return False


FAMILIES: dict[str, Family] = {
    "llama": Family(
        LlamaConfig,
        CrossheadLlamaConfig,
        "LlamaForCausalLM",
        qkv_bias=_attention_bias,
        output_bias=_attention_bias,
        mlp_bias=_mlp_bias,
    ),
    "qwen2": Family(
        Qwen2Config,
        CrossheadQwen2Config,
        "Qwen2ForCausalLM",
        qkv_bias=_always,
        output_bias=_never,
        mlp_bias=_never,
    ),
    "qwen3": Family(
        Qwen3Config,
        CrossheadQwen3Config,
        "Qwen3ForCausalLM",
        qkv_bias=_attention_bias,
        output_bias=_attention_bias,
        mlp_bias=_never,
        key_norm=True,
    ),
    "qwen3_moe": Family(
        Qwen3MoeConfig,
        CrossheadQwen3MoeConfig,
        "Qwen3MoeForCausalLM",
        qkv_bias=_attention_bias,
        output_bias=_attention_bias,
        mlp_bias=_never,
        key_norm=True,
        experts=True,
    ),
}
"""The stock `model_type` -> its family."""
PREFIX = "crosshead_"
_MOST = 10**9
COUNTS = {
    "num_hidden_layers": 1_000,
    "num_attention_heads": 10_000,
    "num_key_value_heads": 10_000,
    "num_experts": 10_000,
    "num_local_experts": 10_000,
    "num_experts_per_tok": 10_000,
    "decoder_sparse_step": _MOST,
    "hidden_size": _MOST,
    "intermediate_size": _MOST,
    "moe_intermediate_size": _MOST,
    "head_dim": _MOST,
    "vocab_size": _MOST,
    "max_position_embeddings": _MOST,
    "num_labels": 10_000,
}
"""Fields that count something -> the greatest number they may hold: a damaged one must not exhaust the memory."""
MOST_EXPERTS = 100_000
"""Of all layers together."""
IGNORED = {
    re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"): "computed from the config",
}
"""Names of tensors that may be dropped -> why."""
FUSED_EXPERTS = re.compile(r"model\.layers\.\d+\.mlp\.experts\.(gate_up|down)_proj")
"""Names of tensors that transformers can be told to save instead of one tensor for each expert."""
Shapes = dict[str, tuple[int, ...]]


def family_of(config: Any) -> Family:
    """The family of a stock config or of one of ours."""
    return FAMILIES[config.model_type.removeprefix(PREFIX)]


def layer_prefix(layer: int) -> str:
    """What the names of one layer's tensors start with."""
    return f"model.layers.{layer}."


def head_size(config: Any) -> int:
    """Features of one head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def stock_shapes(config: Any) -> Shapes:
    """The tensors of the stock checkpoint and their shapes; of ours, with `mixers`, as if there were none."""
    hidden, vocabulary = config.hidden_size, config.vocab_size
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(config.num_hidden_layers):
        prefix = layer_prefix(layer)
        shapes |= {prefix + name: shape for name, shape in _layer_shapes(config, layer)}
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
    family, hidden, size = family_of(config), config.hidden_size, head_size(config)
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
    """Why a tensor of this name may be dropped; None where it may not."""
    return next((reason for pattern, reason in IGNORED.items() if pattern.fullmatch(name)), None)


def kind_of(content: dict[str, Any]) -> str:
    """Whether a configuration is a "stock" one or, with mechanisms, a "mixed" one."""
    return "mixed" if str(content.get("model_type")).startswith(PREFIX) else "stock"


def read_config(content: dict[str, Any], kind: str, name: str) -> Any:
    """The checked configuration of a checkpoint: `kind` is "stock" or "mixed"."""
    model_type = content.get("model_type")
    allowed = [PREFIX * (kind == "mixed") + family for family in FAMILIES]
    if model_type not in allowed:
        raise ConversionError(_wrong_family(name, model_type, kind, allowed))
    if content.get("quantization_config"):
        method = content["quantization_config"]
        method = method.get("quant_method", method) if isinstance(method, dict) else method
        raise ConversionError(
            f"{name} is quantised ({method!r}): convert the unquantised checkpoint, or dequantise it first"
        )
    family = FAMILIES[str(model_type).removeprefix(PREFIX)]
    _check_fields(content, family, f"config.json of {name}")
    if kind == "stock" and content.get("expert_bias"):
        raise ConversionError(
            f"config.json of {name} has expert_bias={shown(content['expert_bias'])}, and a stock router has no place "
            "for a bias: take it out"
        )
    try:
        config = (family.mixed if kind == "mixed" else family.stock).from_dict(content)
        with torch.device("meta"):  # some values are looked at only when a model is made
            AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation="eager")
        return config
    except Exception as error:  # a config may hold anything, and the library checks it in many ways
        raise ConversionError(f"config.json of {name} cannot be used: {one_line(error)}") from error


def check_plain(content: dict[str, Any], name: str) -> None:
    """`ConversionError` where a stock model comes with code of its own, so that it may be another one."""
    brought = content.get("auto_map")
    if isinstance(brought, dict):
        brought = {key: value for key, value in brought.items() if not key.startswith("AutoTokenizer")}
    if brought:
        raise ConversionError(
            f"{name} brings its own code (auto_map={shown(brought)}), which is not run here: if it is a plain "
            f"{content['model_type']} model all the same, take auto_map out of its config.json, in a copy"
        )


def _check_fields(content: dict[str, Any], family: Family, where: str) -> None:
    """What the library takes without looking."""
    for field, most in COUNTS.items():
        value = content.get(field)
        if value is not None and not (is_whole(value) and 1 <= value <= most):
            raise ConversionError(f"{where} has {field}={shown(value)}: use a whole number from 1 to {most}")
    layers = content.get("num_hidden_layers") or 1
    for field in ("num_experts", "num_local_experts"):
        if layers * (content.get(field) or 1) > MOST_EXPERTS:
            raise ConversionError(f"{where} has {field}={content[field]} in {layers} layers: more than any model has")
    for field, value in content.items():
        if callable(getattr(family.mixed, field, None)):  # the library would put the value in the method's place
            raise ConversionError(f"{where} has {field}={shown(value)}: no configuration has it, take it out")


def _wrong_family(name: str, model_type: Any, kind: str, allowed: list[str]) -> str:
    given = f"{name} has model_type={model_type!r}"
    if kind == "stock" and isinstance(model_type, str) and model_type.startswith(PREFIX):
        return f"{given} and is a crosshead model already: `crosshead fold` takes it back to a stock one"
    if kind == "mixed" and model_type in FAMILIES:
        return f"{given}, a stock model without mechanisms: `crosshead convert` gives it some"
    return f"{given}, which cannot be converted: use a model of type {', '.join(allowed)}"
