"""Model families that can be converted, their configs, and the tensors of their checkpoints."""

import re
from collections.abc import Callable, Container, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
import transformers
from transformers import (
    AlbertConfig,
    BertConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DeiTConfig,
    Dinov2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    T5Config,
    ViTConfig,
)
from transformers.core_model_loading import revert_weight_conversion

from crosshead.common.checked_json import quoted
from crosshead.common.errors import ConversionError, one_line
from crosshead.modeling.backbones.albert import CrossheadAlbertConfig
from crosshead.modeling.backbones.bert import CrossheadBertConfig
from crosshead.modeling.backbones.deepseek_v2 import CrossheadDeepseekV2Config
from crosshead.modeling.backbones.deepseek_v3 import CrossheadDeepseekV3Config
from crosshead.modeling.backbones.deit import CrossheadDeiTConfig
from crosshead.modeling.backbones.dinov2 import CrossheadDinov2Config
from crosshead.modeling.backbones.llama import CrossheadLlamaConfig
from crosshead.modeling.backbones.qwen2 import CrossheadQwen2Config
from crosshead.modeling.backbones.qwen3 import CrossheadQwen3Config
from crosshead.modeling.backbones.qwen3_moe import CrossheadQwen3MoeConfig
from crosshead.modeling.backbones.t5 import CROSS, DECODER, ENCODER, CrossheadT5Config
from crosshead.modeling.backbones.vit import CrossheadViTConfig

from .config_fields import check_fields

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Shapes = dict[str, tuple[int, ...]]
"""Tensor name -> shape."""


@dataclass(frozen=True)
class Family:
    """A stock model family and its crosshead counterpart."""

    stock: type[PreTrainedConfig]
    crosshead: type[Any]
    """The crosshead config class."""
    architecture: str
    """Name of the stock model class; the default for a family with several classes."""
    attention: str = "model.layers.{layer}.self_attn."
    """Prefix of the names of a layer's attention tensors."""
    parts: Mapping[str, str] = field(default_factory=lambda: {"": ""})
    """Prefix of an attention tensor's name in decoders -> prefix in this family."""
    stacks: Mapping[str, str] | None = None
    """Part of a T5 -> prefix of the names of its attention tensors; replaces `attention`."""
    is_encoder: bool = False
    """True for encoders and for encoder-decoders."""
    reads_images: bool = False
    """True for vision transformers."""
    qkv_bias: Callable[[Any], bool] = attrgetter("attention_bias")
    """Config -> True if the query, key and value projections have biases."""
    experts: bool = False
    """True for families with mixture-of-experts layers."""
    latent: bool = False
    """True if keys and values are expanded from one latent vector (MLA)."""


_SELF = {"q_proj.": "self.query.", "k_proj.": "self.key.", "v_proj.": "self.value."}
_VISION: dict[str, Any] = {
    "attention": "{base}encoder.layer.{layer}.attention.",
    "parts": {
        "q_proj.": "attention.query.",
        "k_proj.": "attention.key.",
        "v_proj.": "attention.value.",
        "o_proj.": "output.dense.",
        "mixers.": "mixers.",
    },
    "is_encoder": True,
    "reads_images": True,
    "qkv_bias": attrgetter("qkv_bias"),
}
FAMILIES: dict[str, Family] = {
    "llama": Family(LlamaConfig, CrossheadLlamaConfig, "LlamaForCausalLM"),
    "qwen2": Family(Qwen2Config, CrossheadQwen2Config, "Qwen2ForCausalLM", qkv_bias=lambda config: True),
    "qwen3": Family(Qwen3Config, CrossheadQwen3Config, "Qwen3ForCausalLM"),
    "qwen3_moe": Family(Qwen3MoeConfig, CrossheadQwen3MoeConfig, "Qwen3MoeForCausalLM", experts=True),
    "deepseek_v2": Family(
        DeepseekV2Config, CrossheadDeepseekV2Config, "DeepseekV2ForCausalLM", experts=True, latent=True
    ),
    "deepseek_v3": Family(
        DeepseekV3Config, CrossheadDeepseekV3Config, "DeepseekV3ForCausalLM", experts=True, latent=True
    ),
    "bert": Family(
        BertConfig,
        CrossheadBertConfig,
        "BertForMaskedLM",
        attention="{base}encoder.layer.{layer}.attention.",
        parts=_SELF | {"o_proj.": "output.dense.", "mixers.": "self.mixers."},
        is_encoder=True,
        qkv_bias=lambda config: True,
    ),
    "albert": Family(
        AlbertConfig,
        CrossheadAlbertConfig,
        "AlbertForMaskedLM",
        attention="{base}encoder.albert_layer_groups.{group}.albert_layers.{inner}.attention.",
        parts={"q_proj.": "query.", "k_proj.": "key.", "v_proj.": "value.", "o_proj.": "dense.", "mixers.": "mixers."},
        is_encoder=True,
        qkv_bias=lambda config: True,
    ),
    "vit": Family(ViTConfig, CrossheadViTConfig, "ViTForImageClassification", **_VISION),
    "deit": Family(DeiTConfig, CrossheadDeiTConfig, "DeiTForImageClassification", **_VISION),
    "t5": Family(
        T5Config,
        CrossheadT5Config,
        "T5ForConditionalGeneration",
        parts={"q_proj.": "q.", "k_proj.": "k.", "v_proj.": "v.", "o_proj.": "o.", "mixers.": "mixers."},
        stacks={
            ENCODER: "encoder.block.{layer}.layer.0.SelfAttention.",
            DECODER: "decoder.block.{layer}.layer.0.SelfAttention.",
            CROSS: "decoder.block.{layer}.layer.1.EncDecAttention.",
        },
        is_encoder=True,
        qkv_bias=lambda config: False,
    ),
    "dinov2": Family(Dinov2Config, CrossheadDinov2Config, "Dinov2ForImageClassification", **_VISION),
}
"""Stock `model_type` -> family."""
PREFIX = "crosshead_"
INVERSE_FREQUENCIES = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Names of RoPE frequencies, which old checkpoints store and transformers computes from the config."""
OTHER_HEADS = re.compile(
    r"(cls\.(predictions|seq_relationship)|predictions|sop_classifier|(\w+\.)?pooler)\..+|(\w+\.)?embeddings\.mask_token"
)
"""Names of pretraining tensors (heads, pooler, mask token) that an encoder's model class may lack."""
CROSS_BIAS = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
"""An unused tensor in the first T5 checkpoints."""
NEXT_TOKENS = re.compile(r"(model\.layers\.\d+\.)eh_proj\.weight")
"""Tensor name that identifies a layer for multi-token prediction (MTP) in a DeepSeek-V3 checkpoint."""
FUSED_EXPERTS = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)(gate_up_proj|down_proj)")
"""Names of parameters that fuse all experts of a layer; a checkpoint stores each expert separately."""
FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Fused parameter -> the tensors of each expert in a checkpoint, in the order of the parameter's rows."""


def family_of(config: Any) -> Family:
    """Return the family of a stock or crosshead config."""
    return FAMILIES[config.model_type.removeprefix(PREFIX)]


def classes_of(family: Family) -> list[str]:
    """Return the names of a family's stock model classes that have a crosshead counterpart."""
    start = family.crosshead.class_prefix.removeprefix("Crosshead")
    return [start + ending for ending in family.crosshead.auto_classes.values()]


def architecture_of(config: Any) -> str:
    """Return the name of a checkpoint's stock model class; encoder families have several, and the config names one."""
    family = family_of(config)
    named = (getattr(config, "architectures", None) or [""])[0].removeprefix("Crosshead")
    return named if family.is_encoder and named in classes_of(family) else family.architecture


def encoder_only_fields(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config field `is_encoder_decoder=False` for a T5EncoderModel checkpoint, else no field."""
    names = content.get("architectures")
    is_encoder = isinstance(names, list) and bool(names) and str(names[0]).endswith("T5EncoderModel")
    return {"is_encoder_decoder": False} if is_encoder else {}


def auto_class(config: Any) -> str:
    """Return the name of the Auto class that loads a checkpoint."""
    config_class, architecture = family_of(config).crosshead, architecture_of(config)
    ending = architecture.removeprefix(config_class.class_prefix.removeprefix("Crosshead"))
    return next(auto for auto, class_ending in config_class.auto_classes.items() if class_ending == ending)


def empty_model(config: Any, **options: Any) -> Any:
    """Return the model of a stock or crosshead config on the meta device."""
    with torch.device("meta"):  # a copy, because transformers writes the attention implementation into the config
        return getattr(transformers, auto_class(config)).from_config(deepcopy(config), **options)


def tied_tensors(config: Any) -> dict[str, str]:
    """Return the tied tensors, which a checkpoint may omit -> the stored tensors that they equal; {} for a T5."""
    is_tied = getattr(config, "tie_word_embeddings", False) and not family_of(config).stacks
    return dict(empty_model(config)._tied_weights_keys or {}) if is_tied else {}


def stored_embedding(model: Any, stored: Container[str]) -> tuple[set[str], str]:
    """Return the names of a T5's embeddings, including its head, and the stored one that all missing ones equal.

    As in transformers, an embedding that the checkpoint stores is used, even if the config ties it.
    """
    tied = dict.fromkeys(["shared.weight", *model._tied_weights_keys])
    return set(tied), next((name for name in tied if name in stored), "shared.weight")


def stored_names(model: Any) -> dict[str, str]:
    """Return a vision transformer's tensor names -> names in checkpoints, which earlier transformers releases used."""
    tensors = model.state_dict()
    return {name: next(iter(revert_weight_conversion(model, {name: tensors[name]}))) for name in tensors}


def tensor_shapes(config: Any, stored: Container[str] = ()) -> Shapes:
    """Return the names and shapes of the tensors of a stock or crosshead checkpoint.

    `stored` are the names in the checkpoint; they determine which embeddings of a T5 are tied.
    """
    model = empty_model(config, attn_implementation="eager")
    # As in `save_pretrained`: each expert has its own tensors, and some names are those of earlier releases.
    tensors = revert_weight_conversion(model, model.state_dict())
    tied: Container[str] = tied_tensors(config)
    if family_of(config).stacks:
        embeddings, first = stored_embedding(model, stored)
        tied = {name for name in embeddings - {first} if name not in stored}
    return {name: tuple(tensor.shape) for name, tensor in tensors.items() if name not in tied}


def kind_of(content: dict[str, Any]) -> str:
    """Return "crosshead" for the config of a crosshead model, else "stock"."""
    return "crosshead" if str(content.get("model_type")).startswith(PREFIX) else "stock"


def check_family(content: dict[str, Any], kind: str, name: str) -> Family:
    """Return the family of a checkpoint; `ConversionError` if it is unknown, or if the weights are quantised."""
    model_type = content.get("model_type")
    allowed = [PREFIX * (kind == "crosshead") + family for family in FAMILIES]
    if model_type not in allowed:
        raise ConversionError(_wrong_family(name, model_type, kind, allowed))
    if method := content.get("quantization_config"):
        method = method.get("quant_method", method) if isinstance(method, dict) else method
        raise ConversionError(
            f"{name} is quantised ({method!r}): convert the unquantised checkpoint, or dequantise it first"
        )
    return FAMILIES[str(model_type).removeprefix(PREFIX)]


def read_config(content: dict[str, Any], kind: str, name: str) -> Any:
    """Return the validated config of a checkpoint; `kind` is "stock" or "crosshead"."""
    family = check_family(content, kind, name)
    check_fields(content, family.crosshead, f"config.json of {name}")
    names, old_name = content.get("architectures"), "T5WithLMHeadModel"
    if kind == "stock" and family.is_encoder and names and names[0] not in (*classes_of(family), old_name):
        raise ConversionError(
            f"config.json of {name} has architectures={quoted(names)}: convert one of {', '.join(classes_of(family))}"
            "; load the checkpoint with this class and save it"
        )
    if kind == "stock" and content.get("expert_bias"):
        raise ConversionError(
            f"config.json of {name} has expert_bias={quoted(content['expert_bias'])}, but a stock router has no bias: "
            "remove the field"
        )
    try:
        config_class = family.stock if kind == "stock" else family.crosshead
        config = config_class.from_dict(content | encoder_only_fields(content))
        empty_model(config, attn_implementation="eager")  # some values are checked only when a model is created
        return config
    except Exception as error:  # a config may contain anything, and transformers raises many types of errors
        raise ConversionError(f"config.json of {name} cannot be used: {one_line(error)}") from error


def check_plain(content: dict[str, Any], name: str) -> None:
    """Raise `ConversionError` if a stock model has remote code, which may compute something else.

    Published DeepSeek models name code that is part of transformers now.
    """
    classes = FAMILIES[content["model_type"]].architecture.removesuffix("ForCausalLM")
    known = re.compile(rf"([\w./-]+--)?(configuration|modeling)_deepseek\.{classes}\w+$")
    code = content.get("auto_map")
    if isinstance(code, dict):
        code = {key: value for key, value in code.items() if "Tokenizer" not in key and not known.match(str(value))}
    if code:
        raise ConversionError(
            f"{name} has its own modeling code (auto_map={quoted(code)}), which is not run: if it is a plain "
            f"{content['model_type']} model nevertheless, copy it and remove auto_map from config.json"
        )


def _wrong_family(name: str, model_type: Any, kind: str, allowed: list[str]) -> str:
    problem, family = f"{name} has model_type={model_type!r}", str(model_type).removeprefix(PREFIX)
    if family != str(model_type) and family not in FAMILIES:
        return f"{problem}, and transformers has no {family} to convert: use from_pretrained(..., mixers=...)"
    if kind == "stock" and isinstance(model_type, str) and model_type.startswith(PREFIX):
        return f"{problem}, which already is a crosshead model: `crosshead fold` converts it back to a stock model"
    if kind == "crosshead" and model_type in FAMILIES:
        return f"{problem}, a stock model without mechanisms: `crosshead convert` adds mechanisms"
    return f"{problem}, which cannot be converted: use a model of type {', '.join(allowed)}"
