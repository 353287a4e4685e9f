"""Tables of the supported backbones: attention layers, inputs, and names in stock classes."""

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import transformers

from crosshead.common.errors import EvalError
from crosshead.modeling import BACKBONES as OURS
from crosshead.modeling.backbones.dinov2 import NESTED

from ..open_model import Opened, check_backbone

TEXT, TARGET, IMAGE = "text", "target", "image"
"""Kinds of inputs of a model; also the names of the options of `crosshead inspect`."""
DIT = "dit"


@dataclass(frozen=True)
class Part:
    """The attention layers of one kind in a model, such as the cross-attention of a T5."""

    name: str
    modules: str
    """Regular expression for the names of the attention modules in the base model."""
    rows: str = TEXT
    """Kind of input whose tokens are the queries."""
    columns: str = TEXT
    """Kind of input whose tokens are the keys."""
    causal: bool = False


@dataclass(frozen=True)
class Backbone:
    """The attention layers, inputs and names of one architecture."""

    parts: tuple[Part, ...]
    reads: tuple[str, ...] = (TEXT,)
    """Kinds of inputs that the model needs."""
    classes: tuple[str, ...] = ()
    """Endings of the names of supported classes; all classes if empty."""
    arguments: tuple[tuple[str, Any], ...] = ()
    """Additional arguments of the forward pass."""
    value: str = "v_proj"
    """Name of the projection in a stock attention module whose output ends with the values of each head."""
    value_size: str = ""
    """Config field with the size of a value, if that output contains keys, too."""
    output: str = "o_proj"
    """Name of the projection that reads the head outputs; empty if the attention module returns them."""
    calls: tuple[str, ...] = ()
    """Config fields whose product is the number of attention calls, if layers share their weights."""
    special_tokens: tuple[str, ...] = ()
    """Names of the special tokens before the patches of an image."""


DECODER = Backbone(
    (Part("decoder", r"layers\.\d+\.self_attn", causal=True),),
    classes=("ForCausalLM",),
    arguments=(("use_cache", False),),
)
LATENT = replace(DECODER, value="kv_b_proj", value_size="v_head_dim")
T5 = Backbone(
    (
        Part("encoder", r"encoder\.block\.\d+\.layer\.0\.SelfAttention"),
        Part("decoder", r"decoder\.block\.\d+\.layer\.0\.SelfAttention", TARGET, TARGET, causal=True),
        Part("cross", r"decoder\.block\.\d+\.layer\.1\.EncDecAttention", TARGET, TEXT),
    ),
    reads=(TEXT, TARGET),
    classes=("T5Model", "ForConditionalGeneration", "T5WithLMHeadModel"),
    arguments=(("use_cache", False),),
    value="v",
    output="o",
)
CLASSIFICATIONS = ("SequenceClassification", "TokenClassification")
VIT = Backbone((Part("encoder", r"layers\.\d+\.attention", IMAGE, IMAGE),), reads=(IMAGE,), special_tokens=("class",))
DINOV2 = replace(VIT, parts=(Part("encoder", r"encoder\.layer\.\d+\.attention", IMAGE, IMAGE),))
if NESTED:
    NESTED_PART = replace(DINOV2.parts[0], modules=r"encoder\.layer\.\d+\.attention\.attention")
    DINOV2 = replace(DINOV2, parts=(NESTED_PART,), value="value", output="")
ENCODER_HEADS = tuple(f"For{task}" for task in ("MaskedLM", "PreTraining", *CLASSIFICATIONS, "QuestionAnswering"))
BACKBONES = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "qwen3_moe", "gta"), DECODER),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), LATENT),
    "bert": Backbone(
        (Part("encoder", r"encoder\.layer\.\d+\.attention\.self"),),
        value="value",
        output="",
        classes=("BertModel", *ENCODER_HEADS),
    ),
    "albert": Backbone(
        (Part("encoder", r"encoder\.albert_layer_groups\.\d+\.albert_layers\.\d+\.attention"),),
        value="value",
        output="dense",
        calls=("num_hidden_layers", "inner_group_num"),
        classes=("AlbertModel", *ENCODER_HEADS),
    ),
    "t5": T5,
    "T5EncoderModel": replace(T5, parts=T5.parts[:1], reads=(TEXT,), classes=(), arguments=()),
    "vit": VIT,
    "deit": replace(VIT, special_tokens=("class", "distillation")),
    "dinov2": DINOV2,
    DIT: Backbone((Part("encoder", r"transformer_blocks\.\d+\.attn1\.processor", IMAGE, IMAGE),), reads=(IMAGE,)),
}
"""Stock model type, or class name without "Crosshead" where the class decides -> backbone."""


def backbone_of(opened: Opened) -> Backbone:
    """Return the backbone of a model; `EvalError` if it is not supported."""
    if opened.config.model_type == DIT:
        return BACKBONES[DIT]
    check_backbone(opened)
    family, name = opened.config.model_type.removeprefix("crosshead_"), _architecture(opened.config)
    if family == "transnext":
        return _global_stage(opened)
    backbone = BACKBONES.get(name.removeprefix("Crosshead")) or BACKBONES[family]
    if name and backbone.classes and not name.endswith(backbone.classes):
        endings = " or ".join(backbone.classes)
        raise EvalError(f"{opened.name} is a {name}: inspect needs a model whose class ends in {endings}")
    return backbone


def _global_stage(opened: Opened) -> Backbone:
    """Return the last stage of a TransNeXt as a backbone: only this stage attends from all tokens to all tokens."""
    config = opened.config
    if config.sr_ratios[-1] != 1:
        raise EvalError(
            f"{opened.name} has sr_ratios={list(config.sr_ratios)}: inspect shows the last stage, where 1 is needed, "
            "because the layers of other stages attend to windows and pooled features"
        )
    part = Part("last", rf"block{len(config.depths)}\.\d+\.attn", IMAGE, IMAGE)
    return Backbone((part,), reads=(IMAGE,))


def patch_grid(config: Any, height: int, width: int) -> tuple[int, int]:
    """Return the numbers of rows and columns of the patch tokens of an image or a latent."""
    if hasattr(config, "depths"):  # each later stage of a TransNeXt halves the feature map
        stride = config.patch_size * 2 ** (len(config.depths) - 1)
        return ceil(height / stride), ceil(width / stride)
    size = config.patch_size
    down, across = size if isinstance(size, list | tuple) else (size, size)
    return height // down, width // across


def model_class(config: Any) -> Any:
    """Return the class that loads a model as it was saved."""
    ours = {each.__name__: each for models in OURS.values() for each in models}
    name = _architecture(config)
    return ours.get(name) or getattr(transformers, name, None) or transformers.AutoModel


def head_size(config: Any) -> int:
    """Return the size of a query head, which in latent attention is the sum of two fields."""
    if hasattr(config, "qk_nope_head_dim"):
        return int(config.qk_nope_head_dim + config.qk_rope_head_dim)
    return int(getattr(config, "head_dim", None) or config.hidden_size // query_heads(config))


def query_heads(config: Any) -> int:
    """Return the number of query heads of a layer; for a TransNeXt, of the last stage."""
    heads = config.num_attention_heads
    return int(heads[-1] if isinstance(heads, list | tuple) else heads)


def key_value_heads(config: Any) -> int:
    """Return the number of key/value heads; if the config has no field for it, that of query heads."""
    return getattr(config, "num_key_value_heads", None) or query_heads(config)


def _architecture(config: Any) -> str:
    return (config.architectures or [""])[0]
