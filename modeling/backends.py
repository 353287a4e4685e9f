"""Registration of attention functions with transformers, under names that start with "crosshead_".

The mechanisms of a layer choose a function; its name is also a valid `attn_implementation`. Each function takes the
tensors of its mechanism as keyword arguments and equals the stock "sdpa" without them, since other layers of the same
model may lack the mechanism. Importing crosshead replaces some of these functions by faster ones.
"""

from collections.abc import Callable
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

logger = logging.get_logger(__name__)
PREFIX = "crosshead_"
ENGINES = ("vllm", "vllm_mla", "sglang")
"""`attn_implementation` of serving engines, whose own cache is updated by exactly one attention call per layer."""


def register_backend(name: str, function: Callable[..., Any]) -> None:
    """Register a function unless its name is taken. Names in "_eager" get the masks of "eager", others of "sdpa"."""
    if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, eager_mask if name.endswith("_eager") else sdpa_mask)


def is_plain_sdpa(implementation: str | None) -> bool:
    """Whether the implementation is transformers' own "sdpa", not an override, or a "crosshead_" replacement of it."""
    if implementation == "sdpa":
        return ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    return implementation is not None and implementation.startswith(PREFIX)
