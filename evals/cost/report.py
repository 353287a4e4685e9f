"""The cost of a model beside that of its stock backbone, as JSON and as a table."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict
from typing import Any

import torch

from .model import model_cost

LABELS = {
    "parameters": "parameters",
    "active_parameters": "  active for one token",
    "attention_parameters": "  in attention",
    "new_parameters": "  of the mechanisms",
    "training_multiplications": "multiplications a token, training",
    "prefill_multiplications": "  prefill",
    "decode_multiplications": "  decode",
    "training_flops": "FLOPs a token, training",
    "prefill_flops": "  prefill",
    "decode_flops": "  decode",
    "kv_bytes_per_token": "KV cache, bytes a token",
    "kv_bytes": "  at this length",
}


def cost_report(config: Any, length: int) -> dict[str, Any]:
    """The cost of a crosshead config, of the same config without mechanisms, and the difference as a part of that."""
    bare = deepcopy(config)
    bare.mixers = {}
    cost, stock = (asdict(model_cost(each, length)) for each in (config, bare))
    return {
        "model_type": config.model_type,
        "mixers": config.mixers,
        "length": length,
        "dtype": str(config.dtype or torch.get_default_dtype()).removeprefix("torch."),
        "cost": cost,
        "stock": stock,
        "overhead": {name: count / stock[name] - 1 for name, count in cost.items() if stock[name]},
    }


def cost_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The report as a table; one column where the model is a stock one."""
    cost, stock, overhead = report["cost"], report["stock"], report["overhead"]
    mixed = bool(report["mixers"])
    label, figure = max(map(len, LABELS.values())), max(len(f"{max(cost.values()):,}"), len("this model"))
    heads = ("this model", "stock", "overhead") if mixed else ("this model",)
    title = f"at length {report['length']:,} in {report['dtype']}"
    yield "  ".join([title.ljust(label), *(head.rjust(figure) for head in heads)])
    for name, text in LABELS.items():
        cells = [f"{cost[name]:,}"]
        if mixed:
            cells += [f"{stock[name]:,}", f"{overhead[name]:+.2%}" if name in overhead else ""]
        yield "  ".join([text.ljust(label), *(cell.rjust(figure) for cell in cells)]).rstrip()
