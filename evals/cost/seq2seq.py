"""The cost of an encoder-decoder, for a source and a target of the same length.

Training is per token of the target and the source that belongs to it, prefill per token of the source: its encoding,
the keys and values of cross-attention, and the first token of the target. Decoding computes the last token of the
target, with the others in the cache.
"""

from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache

from crosshead.modeling.cache import CACHE

from .counting import TRAINING_PASSES, Cost, multiplications, parameter_counts, work


def seq2seq_cost(model: Any, length: int) -> Cost:
    """The cost of an encoder-decoder."""
    source = torch.zeros(1, length, dtype=torch.long, device="meta")
    first, past = source[:, :1], source[:, : max(length - 1, 1)]
    training = multiplications(lambda: model(source, decoder_input_ids=source, use_cache=False))
    prefill = multiplications(lambda: model(source, decoder_input_ids=first, use_cache=True))
    with torch.no_grad():
        made = model(source, decoder_input_ids=past, use_cache=True)
    cache, encoded = made[CACHE], (made.encoder_last_hidden_state,)
    target = _bytes(cache.self_attention_cache) // past.shape[1]
    cross = _bytes(cache.cross_attention_cache) // length
    if length == 1:  # nothing is cached of the target
        cache = EncoderDecoderCache(DynamicCache(), cache.cross_attention_cache)
    options = {"encoder_outputs": encoded, CACHE: cache, "use_cache": True}
    decode = multiplications(lambda: model(decoder_input_ids=first, **options))
    counts = parameter_counts(model)
    # T5 1.1 and FLAN-T5 store a head; a new model does not.
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
