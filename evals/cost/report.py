"""Reports the cost of a model and of its stock backbone, as JSON and as a table."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, replace
from typing import Any

import torch

from crosshead.modeling.backbones.t5 import PARTS

from .dit_config import DiTConfig
from .model import model_cost

LABELS = {
    "parameters": "parameters",
    "active_parameters": "  active for one token",
    "attention_parameters": "  in attention",
    "new_parameters": "  of the mechanisms",
    "copied_parameters": "  copies of one embedding in blocks",
    "training_multiplications": "multiplications a token, training",
    "prefill_multiplications": "  prefill",
    "decode_multiplications": "  decode",
    "training_flops": "FLOPs a token, training",
    "prefill_flops": "  prefill",
    "decode_flops": "  decode",
    "input_flops": "FLOPs of the whole input",
    "kv_bytes_per_token": "KV cache, bytes a token",
    "cross_kv_bytes_per_token": "  of the source, in cross-attention",
    "kv_bytes": "  at this length",
}


def cost_report(config: Any, length: int, image_size: int | None = None) -> dict[str, Any]:
    """Return the cost of a crosshead config, of the same config without mechanisms, and the relative difference.

    `length` and `image_size` are those of `model_cost`.
    """
    stock_config = _without_mechanisms(config)
    cost, stock = (asdict(model_cost(each, length, image_size)) for each in (config, stock_config))
    return {
        "model_type": config.model_type,
        "mixers": config.mixers,
        "length": length,
        **({} if image_size is None else {"image_size": image_size}),
        "dtype": str(config.dtype or torch.get_default_dtype()).removeprefix("torch."),
        "cost": cost,
        "stock": stock,
        "overhead": {name: count / stock[name] - 1 for name, count in cost.items() if stock[name]},
    }


def _without_mechanisms(config: Any) -> Any:
    """Return the config of the stock model with the same number of head outputs.

    If differential attention pairs heads in all layers and a pair outputs as many features as one head, a pair is one
    head of the stock model.
    """
    if isinstance(config, DiTConfig):
        return replace(config, mixers={})
    stock = deepcopy(config)
    stock.mixers = {}
    pairs = [config.mixers_of_layer(layer).get("differential", {}) for layer in range(len(config.layouts()))]
    if all(pair.get("version") == 2 or pair.get("half_values") for pair in pairs):
        heads, shared = config.num_attention_heads, config.num_key_value_heads
        stock.head_dim = config.layout_of_layer(0).head_dim
        stock.num_key_value_heads = shared // (1 if pairs[0]["version"] == 2 else 2)
        stock.num_attention_heads = heads // 2  # in encoders, num_key_value_heads is the same field
    return stock


def cost_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the report as a table, which has one column of numbers for a stock model."""
    cost, stock, overhead = report["cost"], report["stock"], report["overhead"]
    rows = [[f"at length {report['length']:,} in {report['dtype']}", "this model", "stock", "overhead"]]
    for name, label in LABELS.items():
        if not cost[name] and not stock[name] and name != "new_parameters":
            continue  # an encoder has no cache and does not decode
        change = f"{overhead[name]:+.2%}" if name in overhead else ""
        rows.append([label, f"{cost[name]:,}", f"{stock[name]:,}", change])
    mixers = report["mixers"]
    has_mechanisms = any(mixers.values()) if set(PARTS) & mixers.keys() else bool(mixers)
    first, others = max(map(len, LABELS.values())), max(len(row[1]) for row in rows)
    for label, *cells in rows:
        columns = cells if has_mechanisms else cells[:1]
        yield "  ".join([label.ljust(first), *(cell.rjust(others) for cell in columns)]).rstrip()
