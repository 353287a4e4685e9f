"""Checks of the fields of a checkpoint's config.json."""

from typing import Any

from crosshead.common.checked_json import shown
from crosshead.common.errors import ConversionError
from crosshead.modeling.options import is_whole

_MAX_SIZE = 10**9
MAX_COUNTS = {
    "num_hidden_layers": 1_000,
    "num_attention_heads": 10_000,
    "num_key_value_heads": 10_000,
    "num_experts": 10_000,
    "num_local_experts": 10_000,
    "n_routed_experts": 10_000,
    "n_shared_experts": 10_000,
    "num_experts_per_tok": 10_000,
    "decoder_sparse_step": _MAX_SIZE,
    "hidden_size": _MAX_SIZE,
    "intermediate_size": _MAX_SIZE,
    "moe_intermediate_size": _MAX_SIZE,
    "head_dim": _MAX_SIZE,
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), _MAX_SIZE),
    **dict.fromkeys(("num_layers", "num_decoder_layers"), 1_000),
    **dict.fromkeys(("num_heads", "relative_attention_num_buckets"), 10_000),
    **dict.fromkeys(("d_model", "d_kv", "d_ff", "relative_attention_max_distance"), _MAX_SIZE),
    "vocab_size": _MAX_SIZE,
    "max_position_embeddings": _MAX_SIZE,
    "num_labels": 10_000,
}
"""Integer fields of a config -> their maximum: a damaged value must not exhaust the memory."""
MAX_EXPERTS = 100_000
"""Of all layers together."""


def check_fields(content: dict[str, Any], config_class: type[Any], where: str) -> None:
    """`ConversionError` for values that transformers does not check; `config_class` is the one with mechanisms."""
    for field, maximum in MAX_COUNTS.items():
        value = content.get(field)
        if value is not None and not (is_whole(value) and 1 <= value <= maximum):
            raise ConversionError(f"{where} has {field}={shown(value)}: use an integer from 1 to {maximum}")
    layers = content.get("num_hidden_layers") or 1
    for field in ("num_experts", "num_local_experts", "n_routed_experts"):
        if layers * (content.get(field) or 1) > MAX_EXPERTS:
            raise ConversionError(
                f"{where} has {field}={content[field]} in {layers} layers: at most {MAX_EXPERTS} experts are supported"
            )
    for field, value in content.items():
        if callable(getattr(config_class, field, None)):  # transformers would replace the method by the value
            raise ConversionError(f"{where} has {field}={shown(value)}: it is not a field of a config, remove it")
