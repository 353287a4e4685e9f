"""Attention functions of our own, registered with transformers under names that start with "crosshead_".

A layer chooses one by its mechanisms; `attn_implementation` accepts the names, too. Each function gets its further
tensors as keyword arguments, and without them it is the stock "sdpa": the layers of a model may differ. crosshead's
faster functions take the place of those here when it is imported.
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
"""Implementations of serving engines: they have a cache of their own, which one call per layer updates."""


def register_backend(name: str, function: Callable[..., Any]) -> None:
    """Register a function unless its name is taken, with the masks of "eager" (names in "_eager") or of "sdpa"."""
    if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, eager_mask if name.endswith("_eager") else sdpa_mask)


def is_plain_sdpa(implementation: str | None) -> bool:
    """Whether an `attn_implementation` is transformers' own "sdpa", or one of ours, which stand for it."""
    if implementation == "sdpa":
        return ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    return implementation is not None and implementation.startswith(PREFIX)
