"""Computes the cost of an encoder-decoder, for a source and a target of the same length.

Training is counted per target token, and includes the work on the source. Prefill is counted per source token:
encoding the source, the keys and values of cross-attention, and the first target token. Decoding computes the last
target token, with the other target tokens and the source in the cache.
"""

from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache

from crosshead.modeling.cache import CACHE

from .counting import TRAINING_PASSES, Cost, multiplications, parameter_counts, work


def seq2seq_cost(model: Any, length: int) -> Cost:
    """Return the cost of an encoder-decoder, for a source and a target of `length` tokens each."""
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
    tensors = (tensor for layer in cache.layers for tensor in (layer.keys, layer.values))
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)
