"""The cost of a model from its config: parameters, multiplications and FLOPs per token, bytes of KV cache.

The model is created on the meta device, where tensors have shapes but no memory. Its attention layers run there, and
PyTorch's counter counts their matrix products as the papers do: each query meets each key, although a causal mask, a
window or an inactive head would let a fast backend skip some. In the other layers, each weight of a matrix multiplies
once per token; in a mixture of experts, those of the selected experts do. Norms, RoPE, softmax, biases and other
elementwise work are not counted; a product with a single row or feature, which PyTorch computes elementwise, is.

A multiplication and its addition are two FLOPs. Training is a forward pass and a backward pass, which costs twice as
much, without activation checkpointing and without the optimiser.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from crosshead.modeling.encoder import image_shape

FLOPS = 2
"""Per multiplication."""
TRAINING_PASSES = 3
"""The cost of training in forward passes."""
ATTENTION, NEW, EXPERTS = "self_attn.", "self_attn.mixers.", "mlp.experts."
"""Prefixes of the names of a decoder layer's parameters."""


@dataclass(frozen=True)
class Cost:
    """The cost of a model for texts of one length; figures of work are per token.

    Training and prefill process a whole text. Training needs the logits of all tokens, prefill those of the last.
    Decoding computes the last token with the others in the cache.
    """

    parameters: int
    active_parameters: int
    """Without the experts that a token does not select."""
    attention_parameters: int
    new_parameters: int
    """The mechanisms' part of attention's."""
    training_multiplications: int
    prefill_multiplications: int
    decode_multiplications: int
    training_flops: int
    prefill_flops: int
    decode_flops: int
    kv_bytes_per_token: int
    kv_bytes: int
    """For the whole text."""


def model_cost(config: Any, length: int) -> Cost:
    """The cost of a stock or crosshead model for texts of `length` tokens."""
    if length < 1:
        raise ValueError(f"length={length} is not allowed: use at least 1 token")
    model = on_meta(config)
    if not model.can_generate():
        return _encoder_cost(model, length)
    head = model.lm_head.weight.numel()
    active = _active_experts(model.config)
    forward = decode = bytes_per_token = cache_bytes = 0
    angles = position_embeddings(model.model.rotary_emb)
    # The library's own cache knows which layers have a window.
    for layer, cache in zip(model.model.layers, DynamicCache(config=model.config).layers, strict=True):
        attention_forward, attention_decode, cached = attention_cost(layer.self_attn, angles, length)
        weights = _weights_outside_attention(layer, active)
        forward += attention_forward // length + weights
        decode += attention_decode + weights
        window = getattr(cache, "sliding_window", None)
        bytes_per_token += cached * model.dtype.itemsize
        # A full window makes room for the token to come.
        cache_bytes += cached * model.dtype.itemsize * (length if window is None else min(length, window - 1))
    work = {
        "training": TRAINING_PASSES * (forward + head),
        "prefill": forward + round(Fraction(head, length)),
        "decode": decode + head,
    }
    return Cost(
        **_parameters(model, active),
        **{f"{phase}_multiplications": count for phase, count in work.items()},
        **{f"{phase}_flops": FLOPS * count for phase, count in work.items()},
        kv_bytes_per_token=bytes_per_token,
        kv_bytes=cache_bytes,
    )


def _encoder_cost(model: Any, length: int) -> Cost:
    """The cost of an encoder with the head that its config names; there is no cache and no decoding."""
    maximum = usual_length(model.config, length)
    if hasattr(model.config, "image_size"):
        if length != maximum:
            raise ValueError(f"length={length} is not allowed: an image has {maximum} tokens here")
        inputs = torch.empty(1, *image_shape(model.config), device="meta")
    else:
        if length > maximum:
            raise ValueError(f"length={length} is not allowed: the model has max_position_embeddings={maximum}")
        inputs = torch.zeros(1, length, dtype=torch.long, device="meta")
    forward = multiplications(lambda: model(inputs)) // length
    work = {"training": TRAINING_PASSES * forward, "prefill": forward, "decode": 0}
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return Cost(
        parameters=model.num_parameters(),
        active_parameters=model.num_parameters(),
        attention_parameters=sum(
            size for name, size in sizes.items() if ".attention." in name and ".LayerNorm." not in name
        ),
        new_parameters=sum(size for name, size in sizes.items() if ".mixers." in name),
        **{f"{phase}_multiplications": count for phase, count in work.items()},
        **{f"{phase}_flops": FLOPS * count for phase, count in work.items()},
        kv_bytes_per_token=0,
        kv_bytes=0,
    )


def usual_length(config: Any, wanted: int) -> int:
    """The tokens of an image, or of a text with the wanted length if the model's context is long enough."""
    if not hasattr(config, "image_size"):
        return min(wanted, config.max_position_embeddings)
    embeddings = on_meta(config).base_model.embeddings
    count: int = embeddings(torch.empty(1, *image_shape(config), device="meta")).shape[1]
    return count


def on_meta(config: Any) -> Any:
    """The language model of a config, or its encoder, without memory for its weights."""
    served, auto_class = getattr(config, "auto_classes", {}), "AutoModelForCausalLM"
    if served and auto_class not in served:  # an encoder, with the head that the config names, or the usual one
        head = (config.architectures or [""])[0].removeprefix(config.class_prefix)
        auto_class = next((auto for auto, ending in served.items() if ending == head), list(served)[1])
    with torch.device("meta"):
        return getattr(transformers, auto_class).from_config(deepcopy(config), attn_implementation="eager")


Angles = tuple[torch.Tensor, ...] | torch.Tensor
"""What a model passes to its attention layers as `position_embeddings`."""


def position_embeddings(rotary: Any) -> Angles:
    """Those of one token, from the module of a model that makes them."""
    made: Angles = type(rotary)(config=rotary.config)(torch.empty(1, 1, 1), torch.zeros(1, 1, dtype=torch.long))
    return made


def attention_cost(attention: Any, angles: Angles, length: int) -> tuple[int, int, int]:
    """Run a stock or crosshead attention module on the meta device; `angles` are the position embeddings of a token.

    Returns the multiplications for all tokens of a text, those for its last token with the others cached, and how many
    numbers the cache holds per token.
    """
    config, dtype = attention.config, attention.o_proj.weight.dtype

    def empty(like: torch.Tensor, tokens: int) -> torch.Tensor:
        kind = like.dtype if like.is_complex() else dtype
        return torch.empty(1, tokens, like.shape[-1], dtype=kind, device="meta")

    def run(tokens: int, cache: DynamicCache) -> None:
        hidden = torch.empty(1, tokens, config.hidden_size, dtype=dtype, device="meta")
        made = empty(angles, tokens) if isinstance(angles, torch.Tensor) else tuple(empty(x, tokens) for x in angles)
        attention(hidden, position_embeddings=made, attention_mask=None, past_key_values=cache)

    one_token, past = DynamicCache(config=config), DynamicCache(config=config)
    run(1, one_token)
    cached = one_token.layers[attention.layer_idx]
    if length > 1:
        run(length - 1, past)
    forward = multiplications(lambda: run(length, DynamicCache(config=config)))
    return forward, multiplications(lambda: run(1, past)), cached.keys.numel() + cached.values.numel()


def multiplications(call: Callable[[], Any]) -> int:
    """The multiplications of the matrix products in a call."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops()) // FLOPS


def _active_experts(config: Any) -> Fraction:
    """The part of the experts that a token selects."""
    counts = (getattr(config, name, None) for name in ("num_experts", "num_local_experts"))
    experts = next((count for count in counts if count), None)
    return Fraction(1) if experts is None else Fraction(config.num_experts_per_tok, experts)


def _parameters(model: Any, active: Fraction) -> dict[str, int]:
    """The counts of `Cost`; `active` is the part of the experts that a token selects."""
    total = model.num_parameters()
    sizes = [(name, parameter.numel()) for layer in model.model.layers for name, parameter in layer.named_parameters()]
    experts = sum(size for name, size in sizes if name.startswith(EXPERTS))
    return {
        "parameters": total,
        "active_parameters": total - experts + int(experts * active),
        "attention_parameters": sum(size for name, size in sizes if name.startswith(ATTENTION)),
        "new_parameters": sum(size for name, size in sizes if name.startswith(NEW)),
    }


def _weights_outside_attention(layer: Any, active: Fraction) -> int:
    """The weights of matrices that multiply for one token."""
    total = Fraction(0)
    for name, weight in layer.named_parameters():
        if weight.ndim > 1 and not name.startswith(ATTENTION):
            total += weight.numel() * (active if name.startswith(EXPERTS) else 1)
    return int(total)
