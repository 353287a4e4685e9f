"""The cost of a model as a dataclass, models on the meta device, and the counter of multiplications."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

FLOPS = 2
"""FLOPs per multiplication: the multiplication and an addition."""
TRAINING_PASSES = 3
"""Cost of a training step in forward passes."""
ATTENTION = (".self_attn.", ".attention.", ".attn.", ".attn1.", ".SelfAttention.", ".EncDecAttention.")
"""Parts of the names of attention parameters."""
EXPERTS = ".mlp.experts."
"""Part of the names of the parameters of experts."""


@dataclass(frozen=True)
class Cost:
    """The cost of a model for inputs of one length; multiplications and FLOPs are per token unless stated otherwise.

    Training and prefill process a whole text. Training needs the logits of all tokens, prefill those of the last one.
    Decoding computes the last token, with the other tokens in the cache. A model of images or latents processes all
    tokens at once.
    """

    parameters: int
    active_parameters: int
    """Number of parameters without the experts that a token does not select."""
    attention_parameters: int
    new_parameters: int
    """Number of attention parameters that belong to mechanisms."""
    copied_parameters: int
    """Number of parameters in copies of the time and class embedding, which diffusers stores in each DiT block."""
    training_multiplications: int
    prefill_multiplications: int
    decode_multiplications: int
    training_flops: int
    prefill_flops: int
    decode_flops: int
    input_flops: int
    """FLOPs for the whole input: prefill of a text, or the forward pass of an image or a latent."""
    kv_bytes_per_token: int = 0
    cross_kv_bytes_per_token: int = 0
    """Bytes of the cross-attention cache per token of the source."""
    kv_bytes: int = 0
    """Bytes of the cache for the whole text; in an encoder-decoder, for a source and a target of this length."""


def work(training: int, prefill: int, decode: int, whole: int) -> dict[str, int]:
    """Return the multiplications and FLOPs of `Cost` from multiplications per token, and for the whole input."""
    counts = {"training": training, "prefill": prefill, "decode": decode}
    return {
        **{f"{phase}_multiplications": count for phase, count in counts.items()},
        **{f"{phase}_flops": FLOPS * count for phase, count in counts.items()},
        "input_flops": FLOPS * whole,
    }


def parameter_counts(model: Any, copied: int = 0, active: Fraction = Fraction(1)) -> dict[str, int]:
    """Return the parameter counts in `Cost`; `active` is the fraction of the experts that a token selects."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    attention = (name for name in sizes if any(part in name for part in ATTENTION) and ".LayerNorm." not in name)
    total, experts = sum(sizes.values()), sum(size for name, size in sizes.items() if EXPERTS in name)
    return {
        "parameters": total,
        "active_parameters": total - experts + int(experts * active),
        "attention_parameters": sum(sizes[name] for name in attention),
        "new_parameters": sum(size for name, size in sizes.items() if ".mixers." in name),
        "copied_parameters": copied,
    }


def on_meta(config: Any) -> Any:
    """Create the model of a config on the meta device, with the head of its `architectures` or the usual head."""
    auto_classes, auto_class = getattr(config, "auto_classes", {}), "AutoModelForCausalLM"
    if auto_classes:
        class_name = (config.architectures or [""])[0].removeprefix("Crosshead")
        head = class_name.removeprefix(config.class_prefix.removeprefix("Crosshead"))
        auto_class = next((auto for auto, ending in auto_classes.items() if ending == head), list(auto_classes)[1])
    with torch.device("meta"):
        return getattr(transformers, auto_class).from_config(deepcopy(config), attn_implementation="eager")


def multiplications(call: Callable[[], Any]) -> int:
    """Return the number of multiplications in the matrix products of a call."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops()) // FLOPS
