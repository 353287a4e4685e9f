"""Compares the time of `mixture` in a vision transformer with stock attention, on the CPU, without gradients.

usage: PYTHONPATH=tests/measure python -P tests/measure/image_speed.py OUT.json [--rounds 25] [--images 1]

The model is one layer of ViT-Base (12 heads of 64) with random weights, on 1,024 patches and the class token; 6 heads
are active per token, 3 of them shared. Runs of `mixture` and of stock attention alternate, in float32: the attention
function alone, the attention layer with projections and router, and the whole layer with the MLP. Measures the CPU
time of one thread, which other processes disturb less. `ratio_of_best` compares the best runs of both.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import ViTConfig, ViTModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import crosshead
from crosshead.evals.bench.machine import machine
from crosshead.evals.bench.pairs import measure_alternating

SHAPE: dict[str, Any] = {"num_hidden_layers": 1, "image_size": 512, "patch_size": 16, "attn_implementation": "sdpa"}
MIXERS = {"mixture": {"active_heads": 6, "shared_heads": 3, "gate": "binary"}}
TOKENS = 1025


def layers() -> tuple[Any, Any]:
    """A layer with `mixture` and a stock layer, which have the same weights except for the router."""
    torch.manual_seed(0)
    stock = ViTModel(ViTConfig(**SHAPE)).eval()
    ours = crosshead.CrossheadViTModel(crosshead.CrossheadViTConfig(**SHAPE, mixers=MIXERS)).eval()
    ours.load_state_dict(stock.state_dict(), strict=False)
    return ours.layers[0], stock.layers[0]


def functions(layer: Any, hidden: torch.Tensor) -> tuple[Any, Any]:
    """Both attention functions, with the queries, keys, values (B, 12, T, 64) and gates of the layer as arguments."""
    attention = layer.attention
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    q, k, v = (projection(hidden).unflatten(-1, (12, 64)).transpose(1, 2) for projection in projections)
    gates, _ = attention.mixers["mixture"](hidden, q)
    skipping = ALL_ATTENTION_FUNCTIONS["crosshead_mixture"]
    options = {"scaling": attention.scaling, "gates": gates, "shared_heads": 3}
    return (
        partial(skipping, attention, q, k, v, None, **options),
        partial(sdpa_attention_forward, attention, q, k, v, None, scaling=attention.scaling),
    )


def cpu_time(run: Callable[[], Any]) -> Callable[[], float]:
    """A function that measures the CPU seconds of `run`, after two warm-up runs."""
    run()
    run()

    def reading() -> float:
        started = time.thread_time()
        run()
        return time.thread_time() - started

    return reading


@torch.inference_mode()
def measured(rounds: int, images: int) -> dict[str, Any]:
    """Part of the model -> times and their ratio."""
    ours, stock = layers()
    hidden = torch.randn(images, TOKENS, 768)
    pairs = {
        "attention function": functions(ours, hidden),
        "attention layer": (partial(ours.attention, hidden), partial(stock.attention, hidden)),
        "whole layer": (partial(ours, hidden), partial(stock, hidden)),
    }
    results = {}
    for name, (mine, baseline) in pairs.items():
        figures = measure_alternating(cpu_time(mine), cpu_time(baseline), rounds)
        results[name] = {"ratio_of_best": min(figures["ours"]) / min(figures["baseline"]), **figures}
        print(f"{name}: {results[name]['ratio_of_best']:.3f} of stock, {min(figures['ours']):.4f} s")
    return results


def main() -> None:
    """Measure, print the ratios, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--images", type=int, default=1, help="images per batch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    content = {"mixers": MIXERS, "tokens": TOKENS, "images": options.images, "machine": machine()}
    content["measured"] = measured(options.rounds, options.images)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
