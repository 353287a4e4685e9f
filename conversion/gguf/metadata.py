"""Converts a stock config to GGUF metadata: the inverse of `config.stock_config`.

A config that llama.cpp does not support is refused, because llama.cpp would run the model with other outputs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crosshead.common.checked_json import quoted
from crosshead.common.errors import ConversionError

from .config import EXPERT_SIZES, SIZES, llama3_factors
from .tensors import ARCHITECTURES

Metadata = dict[str, Any]
"""Metadata key -> a string, a boolean, a number (written as uint32 or float32), or a list of strings or numbers."""
NAMES = {architecture.model_type: name for name, architecture in ARCHITECTURES.items()}
"""Stock `model_type` -> its architecture in GGUF files."""
_FEATURES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "use_sliding_window": (False,),
    "norm_topk_prob": (True,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
}
"""Config field -> the values that llama.cpp supports, in every family that has the field."""
_BIASED = ("llama",)
"""Architectures whose attention biases (`attention_bias`) llama.cpp reads."""
_YARN_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "beta_fast": (None, 32),
    "beta_slow": (None, 1),
    "mscale": (None, 0),
    "mscale_all_dim": (None, 0),
    "truncate": (None, True),
}
"""Parameter of YaRN -> the values that agree with llama.cpp's YaRN."""


@dataclass(frozen=True)
class Description:
    """GGUF metadata of a model, without its tokenizer."""

    architecture: str
    """The value of `general.architecture`."""
    keys: Metadata
    """Metadata key, with the prefix of the architecture -> value."""
    rope_factors: list[float] | None
    """Divisors of the RoPE frequencies, which are stored as a tensor; None if frequencies are not divided."""

    def differences(self, other: "Description") -> list[str]:
        """Return the keys in which two descriptions differ by more than float32 rounding."""
        one, two = (description.keys | {"the RoPE factors": description.rope_factors} for description in (self, other))
        return [key for key in sorted(one | two) if not _is_close(one.get(key), two.get(key))]


def _is_close(one: Any, two: Any) -> bool:
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(_is_close, one, two))
    if isinstance(one, float) and isinstance(two, float):
        return math.isclose(one, two, rel_tol=1e-6)
    return bool(one == two)


def describe(config: Any) -> Description:
    """Return the GGUF metadata of a stock config; `ConversionError` if llama.cpp would compute other outputs."""
    name = NAMES[config.model_type]
    _check_features(config, name)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys: Metadata = {key: getattr(config, field) for key, field in SIZES.items()}
    if ARCHITECTURES[name].experts:
        keys |= {key: getattr(config, field) for key, field in EXPERT_SIZES.items()}
    keys |= {
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_size,
        "attention.value_length": head_size,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": head_size,
        "vocab_size": config.vocab_size,
    }
    rope, factors = _rope(config, head_size)
    if factors is not None and not ARCHITECTURES[name].rope_factors:
        raise _refused("rope_type", config.rope_parameters["rope_type"], f"in the architecture {name}")
    return Description(name, {f"{name}.{key}": value for key, value in (keys | rope).items()}, factors)


def _check_features(config: Any, name: str) -> None:
    for field, allowed in _FEATURES.items():
        value = getattr(config, field, allowed[0])
        if value not in allowed:
            raise _refused(field, value, f"in the architecture {name}")
    if getattr(config, "attention_bias", False) and name not in _BIASED:
        raise _refused("attention_bias", True, f"in the architecture {name}")


def _rope(config: Any, head_size: int) -> tuple[Metadata, list[float] | None]:
    """Return the metadata of RoPE, and the divisors of its frequencies; None if they are not divided."""
    parameters: Mapping[str, Any] = config.rope_parameters
    kind = parameters["rope_type"]
    if parameters.get("partial_rotary_factor", 1) != 1:
        raise _refused("partial_rotary_factor", parameters["partial_rotary_factor"])
    keys: Metadata = {"rope.freq_base": float(parameters["rope_theta"])}
    if kind == "default":
        return keys, None
    if kind == "llama3":
        if not parameters["low_freq_factor"] < parameters["high_freq_factor"]:
            raise _refused("high_freq_factor", parameters["high_freq_factor"])
        return keys, llama3_factors(parameters, head_size)
    if kind == "longrope":
        return keys, _longrope_factors(parameters, config.max_position_embeddings, head_size)
    if kind not in ("linear", "yarn"):
        raise _refused("rope_type", kind)
    keys |= {"rope.scaling.type": kind, "rope.scaling.factor": float(parameters["factor"])}
    if kind == "yarn":
        _check_yarn(parameters)
        keys["rope.scaling.original_context_length"] = int(parameters["original_max_position_embeddings"])
    return keys, None


def _check_yarn(parameters: Mapping[str, Any]) -> None:
    for field, allowed in _YARN_DEFAULTS.items():
        if parameters.get(field) not in allowed:
            raise _refused(field, parameters[field], "in RoPE of the type yarn")
    usual, factor = 0.1 * math.log(max(parameters["factor"], 1)) + 1, parameters.get("attention_factor")
    if factor is not None and not math.isclose(factor, usual, rel_tol=1e-6):
        raise _refused("attention_factor", factor, "in RoPE of the type yarn")


def _longrope_factors(parameters: Mapping[str, Any], length: int, head_size: int) -> list[float]:
    """Return the RoPE divisors of the type longrope; refuse those that depend on length, and scaled attention."""
    short, long = parameters["short_factor"], parameters["long_factor"]
    if short != long:
        raise _refused("short_factor", short, "where long_factor differs, in RoPE of the type longrope")
    if len(short) != head_size // 2:
        raise ConversionError(
            f"config.json has {len(short)} RoPE factors, but heads of {head_size} features: repair it"
        )
    ratio = parameters.get("factor") or length / parameters["original_max_position_embeddings"]
    scale = parameters.get("attention_factor") or (1.0 if ratio <= 1 else None)
    if scale != 1:
        raise _refused("attention_factor", scale, "in RoPE of the type longrope")
    return [float(factor) for factor in short]


def _refused(field: str, value: Any, where: str = "") -> ConversionError:
    suffix = f" {where}" if where else ""
    return ConversionError(
        f"the model has {field}={quoted(value)}, which llama.cpp does not support{suffix}: fold it to a folder instead"
    )
