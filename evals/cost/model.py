"""Computes the cost of a model from its config: parameters, multiplications and FLOPs per token, bytes of KV cache.

The model is created on the meta device, where tensors have shapes but no memory. Its attention layers run there, and
PyTorch's counter counts their matrix products as the papers do: for all pairs of a query and a key, although a causal
mask, a window or an inactive head would let a fast backend skip some. In the other layers, each weight of a matrix
multiplies once per token; in a mixture of experts, only weights of the selected experts do. Norms, RoPE, softmax,
biases and other elementwise operations are not counted; a matrix product with a single row or feature, which PyTorch
computes elementwise, is counted.

A multiplication and its addition are two FLOPs. Training is a forward pass and a backward pass, which costs twice as
much, without activation checkpointing and without the optimiser.
"""

import re
from fractions import Fraction
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache

from crosshead.common.images import image_shape
from crosshead.modeling.cache import CACHE

from .counting import ATTENTION, EXPERTS, TRAINING_PASSES, Cost, multiplications, on_meta, parameter_counts, work
from .dit_config import DiTConfig
from .encoder import dit_cost, encoder_cost, image_tokens

LENGTH = 4096
"""Default number of tokens of a text."""
MAX_LENGTH = 10**8
"""Maximum number of tokens of a text: attention weights of longer texts would exceed torch's largest tensor."""
NOT_COUNTED = ("_modules", "_forward_hooks", "layer_idx")
"""Attributes of modules that differ between equal layers and do not affect the cost."""


def model_cost(config: Any, length: int, image_size: int | None = None) -> Cost:
    """Return the cost of a stock or crosshead model for texts of `length` tokens, or an image of `image_size` pixels.

    Only DINOv2 and TransNeXt read images of another size than their config names.
    """
    check_image_size(config, image_size)
    if not 1 <= length <= MAX_LENGTH:
        raise ValueError(f"length={length} is not allowed: use 1 to {MAX_LENGTH:,} tokens")
    if isinstance(config, DiTConfig):
        return dit_cost(config, length)
    model = on_meta(config)
    if hasattr(model, "decoder"):
        return _seq2seq_cost(model, length)
    if model.can_generate() or hasattr(model.base_model, "rotary_emb"):  # a decoder with any head, or without one
        return _decoder_cost(model, length)
    return encoder_cost(model, length, image_size)


def _decoder_cost(model: Any, length: int) -> Cost:
    """Return the cost of a decoder; a classifier and a model without a head have no cache and do not decode."""
    base, generates = model.base_model, model.can_generate()
    head = _head_weights(model)
    active = _active_experts(model.config)
    forward = whole = decode = bytes_per_token = cache_bytes = 0
    counted: dict[str, tuple[int, int, int]] = {}
    rotary = type(base.rotary_emb)(config=base.rotary_emb.config)  # on the CPU
    angles = rotary(torch.empty(1, 1, 1), torch.zeros(1, 1, dtype=torch.long))  # of one token
    # The cache of transformers knows which layers have a sliding window.
    for layer, cache in zip(base.layers, DynamicCache(config=model.config).layers, strict=True):
        kind = _kind(layer.self_attn)
        if kind not in counted:
            counted[kind] = attention_cost(layer.self_attn, angles, length)
        attention_forward, attention_decode, cached = counted[kind]
        weights = _weights_outside_attention(layer, active)
        forward += attention_forward // length + weights
        whole += attention_forward + weights * length
        decode += attention_decode + weights
        window = getattr(cache, "sliding_window", None)
        bytes_per_token += cached * model.dtype.itemsize
        # A full window keeps one position free for the next token.
        cache_bytes += cached * model.dtype.itemsize * (length if window is None else min(length, window - 1))
    read = head if generates else head * length  # a classifier applies its head to all tokens
    training, prefill = TRAINING_PASSES * (forward + head), forward + round(Fraction(read, length))
    cache_sizes = {"kv_bytes_per_token": bytes_per_token, "kv_bytes": cache_bytes} if generates else {}
    return Cost(
        **parameter_counts(model, active=active),
        **work(training, prefill, decode + head if generates else 0, whole=whole + read),
        **cache_sizes,
    )


def _head_weights(model: Any) -> int:
    """Return the number of weights of the head, which may be tied to the embeddings."""
    base = model.base_model
    heads = [] if base is model else [module for module in model.children() if module is not base]
    return sum(weight.numel() for module in heads for weight in module.parameters() if weight.ndim > 1)


def _kind(attention: Any) -> str:
    """Return all attributes that a layer's cost depends on as text, which is the same for equal layers of a model."""
    parts = {name: vars(module) for name, module in attention.named_modules()}
    attributes = {name: {key: part[key] for key in part if key not in NOT_COUNTED} for name, part in parts.items()}
    return re.sub(r"layer_index=\d+", "", str(attributes))


def check_image_size(config: Any, image_size: int | None) -> None:
    """Raise `ValueError` if an image size is given, and the model does not read images, or not of this size."""
    if image_size is not None:
        if not hasattr(config, "image_size"):
            raise ValueError(f"image_size={image_size} is not allowed: the model does not read images")
        image_shape(config, image_size)


def usual_length(config: Any, length: int = LENGTH, image_size: int | None = None) -> int:
    """Return the number of tokens of an image or a latent, or of a text: `length`, but at most the context length."""
    check_image_size(config, image_size)
    if isinstance(config, DiTConfig):
        return config.tokens
    if hasattr(config, "image_size"):
        return image_tokens(on_meta(config), image_size)
    limits = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions"))
    return min([length, *(limit for limit in limits if limit is not None)])


Angles = tuple[torch.Tensor, ...] | torch.Tensor
"""Argument `position_embeddings` of attention layers."""


def attention_cost(attention: Any, angles: Angles, length: int) -> tuple[int, int, int]:
    """Run a stock or crosshead attention module on the meta device; `angles` are the position embeddings of a token.

    Return the multiplications for all tokens of a text, the multiplications for its last token with the others cached,
    and how many numbers the cache holds per token.
    """
    config, dtype = attention.config, attention.o_proj.weight.dtype

    def empty(like: torch.Tensor, tokens: int) -> torch.Tensor:
        kind = like.dtype if like.is_complex() else dtype
        return torch.empty(1, tokens, like.shape[-1], dtype=kind, device="meta")

    def run(tokens: int, cache: DynamicCache) -> None:
        hidden = torch.empty(1, tokens, config.hidden_size, dtype=dtype, device="meta")
        rotary = empty(angles, tokens) if isinstance(angles, torch.Tensor) else tuple(empty(x, tokens) for x in angles)
        attention(hidden, position_embeddings=rotary, attention_mask=None, **{CACHE: cache})

    one_token, past = DynamicCache(config=config), DynamicCache(config=config)
    run(1, one_token)
    cached = one_token.layers[attention.layer_idx]
    if length > 1:
        run(length - 1, past)
    forward = multiplications(lambda: run(length, DynamicCache(config=config)))
    return forward, multiplications(lambda: run(1, past)), cached.keys.numel() + cached.values.numel()


def _active_experts(config: Any) -> Fraction:
    """Return the fraction of the experts that a token selects."""
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if not experts or getattr(config, "first_k_dense_replace", 0) >= config.num_hidden_layers:
        return Fraction(1)
    if config.num_experts_per_tok is None or config.num_experts_per_tok > experts:
        raise ValueError(
            f"num_experts_per_tok={config.num_experts_per_tok} is not allowed: use a number from 1 to the {experts} "
            "experts"
        )
    return Fraction(config.num_experts_per_tok, experts)


def _weights_outside_attention(layer: Any, active: Fraction) -> int:
    """Return the number of matrix weights outside of attention that multiply for one token."""
    weights = {name: weight.numel() for name, weight in layer.named_parameters("layer") if weight.ndim > 1}
    outside = [name for name in weights if not any(part in name for part in ATTENTION)]
    return int(sum(weights[name] * (active if EXPERTS in name else 1) for name in outside))


def _seq2seq_cost(model: Any, length: int) -> Cost:
    """Return the cost of an encoder-decoder, for a source and a target of `length` tokens each.

    Training is counted per target token, and includes the work on the source. Prefill is counted per source token:
    encoding the source, the keys and values of cross-attention, and the first target token. Decoding computes the last
    target token, with the other target tokens and the source in the cache.
    """
    source = torch.zeros(1, length, dtype=torch.long, device="meta")
    first, past = source[:, :1], source[:, : max(length - 1, 1)]
    training = multiplications(lambda: model(source, decoder_input_ids=source, use_cache=False))
    prefill = multiplications(lambda: model(source, decoder_input_ids=first, use_cache=True))
    with torch.no_grad():
        outputs = model(source, decoder_input_ids=past, use_cache=True)
    cache, encoded = outputs[CACHE], (outputs.encoder_last_hidden_state,)
    target = _bytes(cache.self_attention_cache) // past.shape[1]
    cross = _bytes(cache.cross_attention_cache) // length
    if length == 1:  # no target token is cached
        cache = EncoderDecoderCache(DynamicCache(), cache.cross_attention_cache)
    options = {"encoder_outputs": encoded, CACHE: cache, "use_cache": True}
    decode = multiplications(lambda: model(decoder_input_ids=first, **options))
    counts = parameter_counts(model)
    # T5 1.1 and FLAN-T5 store an LM head of their own; a model that is created from the config does not have it.
    if not getattr(model.config, "scale_decoder_outputs", True):
        for name in ("parameters", "active_parameters"):
            counts[name] += model.lm_head.weight.numel()
    return Cost(
        **counts,
        **work(TRAINING_PASSES * training // length, prefill // length, decode, whole=prefill),
        kv_bytes_per_token=target,
        cross_kv_bytes_per_token=cross,
        kv_bytes=(target + cross) * length,
    )


def _bytes(cache: Any) -> int:
    return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
