"""Checks of the fields of a checkpoint's config.json."""

from typing import Any

from crosshead.common.checked_json import quoted
from crosshead.common.errors import ConversionError
from crosshead.modeling.options import is_whole

MAXIMA = {
    1_000: "num_hidden_layers num_layers num_decoder_layers",
    10_000: "num_attention_heads num_key_value_heads num_heads num_experts num_local_experts n_routed_experts "
    "n_shared_experts num_experts_per_tok relative_attention_num_buckets num_labels",
    10**9: "decoder_sparse_step hidden_size intermediate_size moe_intermediate_size head_dim kv_lora_rank q_lora_rank "
    "qk_nope_head_dim qk_rope_head_dim v_head_dim d_model d_kv d_ff relative_attention_max_distance vocab_size "
    "max_position_embeddings",
}
"""Maximum -> integer config fields that it applies to, so that a damaged value cannot exhaust the memory."""
MAX_EXPERTS = 100_000
"""Maximum number of experts in all layers together."""


def check_fields(content: dict[str, Any], config_class: type[Any], where: str) -> None:
    """Raise `ConversionError` for values that transformers does not check; `config_class` is the crosshead class."""
    for maximum, fields in MAXIMA.items():
        for field in fields.split():
            value = content.get(field)
            if value is not None and not (is_whole(value) and 1 <= value <= maximum):
                raise ConversionError(f"{where} has {field}={quoted(value)}: use an integer from 1 to {maximum}")
    layers = content.get("num_hidden_layers") or 1
    for field in ("num_experts", "num_local_experts", "n_routed_experts"):
        if layers * (content.get(field) or 1) > MAX_EXPERTS:
            raise ConversionError(
                f"{where} has {field}={content[field]} in {layers} layers: at most {MAX_EXPERTS} experts are supported"
            )
    for field, value in content.items():
        if callable(getattr(config_class, field, None)):  # transformers would replace the method by the value
            raise ConversionError(f"{where} has {field}={quoted(value)}: it is not a field of a config, remove it")
