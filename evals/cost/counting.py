"""The figures of a cost, models on the meta device, and the count of multiplications."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from .dit_config import DiTConfig

FLOPS = 2
"""Per multiplication."""
TRAINING_PASSES = 3
"""The cost of training in forward passes."""
ATTENTION = (".attention.", ".attn.", ".attn1.", ".SelfAttention.", ".EncDecAttention.")
"""In the names of the attention parameters of models other than decoders."""
STAGES = "patch_embed1"
"""The embedding of the first stage, in a model of several stages."""


@dataclass(frozen=True)
class Cost:
    """The cost of a model for inputs of one length; figures of work are per token.

    Training and prefill process a whole text. Training needs the logits of all tokens, prefill those of the last.
    Decoding computes the last token with the others in the cache. A model of images or latents processes all tokens.
    """

    parameters: int
    active_parameters: int
    """Without the experts that a token does not select."""
    attention_parameters: int
    new_parameters: int
    """The mechanisms' part of attention's."""
    copied_parameters: int
    """Copies of one embedding of time and class, which diffusers gives to each block of a DiT."""
    training_multiplications: int
    prefill_multiplications: int
    decode_multiplications: int
    training_flops: int
    prefill_flops: int
    decode_flops: int
    input_flops: int
    """Prefill of the whole text, or a forward pass for an image or a latent."""
    kv_bytes_per_token: int
    cross_kv_bytes_per_token: int
    """Of cross-attention, for a token of the source."""
    kv_bytes: int
    """For the whole text; with a source, for a source and a target of this length."""


def work(training: int, prefill: int, decode: int, whole: int) -> dict[str, int]:
    """The figures of work in `Cost`, from multiplications per token, and `whole` for the whole input."""
    counts = {"training": training, "prefill": prefill, "decode": decode}
    return {
        **{f"{phase}_multiplications": count for phase, count in counts.items()},
        **{f"{phase}_flops": FLOPS * count for phase, count in counts.items()},
        "input_flops": FLOPS * whole,
    }


def parameter_counts(model: Any, copied: int = 0) -> dict[str, int]:
    """The counts of parameters in `Cost`, of a model that is not a decoder."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    attention = (name for name in sizes if any(part in name for part in ATTENTION) and ".LayerNorm." not in name)
    return {
        "parameters": sum(sizes.values()),
        "active_parameters": sum(sizes.values()),
        "attention_parameters": sum(sizes[name] for name in attention),
        "new_parameters": sum(size for name, size in sizes.items() if ".mixers." in name),
        "copied_parameters": copied,
    }


def on_meta(config: Any) -> Any:
    """The model of a config, with the head that it names, or the usual one, without memory for its weights."""
    if isinstance(config, DiTConfig):
        return config.on_meta()
    served, auto_class = getattr(config, "auto_classes", {}), "AutoModelForCausalLM"
    if served:
        given = (config.architectures or [""])[0].removeprefix("Crosshead")
        head = given.removeprefix(config.class_prefix.removeprefix("Crosshead"))
        auto_class = next((auto for auto, ending in served.items() if ending == head), list(served)[1])
    with torch.device("meta"):
        return getattr(transformers, auto_class).from_config(deepcopy(config), attn_implementation="eager")


def multiplications(call: Callable[[], Any]) -> int:
    """The multiplications of the matrix products in a call."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops()) // FLOPS
