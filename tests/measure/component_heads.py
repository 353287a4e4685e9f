"""Measures the loss of a model converted to fewer key and value heads, or fewer active heads, without training.

usage: python -P tests/measure/component_heads.py MODEL TEXT [--part 0.5:1] [--calibration FILE] [...] CASE [CASE ...]

MODEL is a source of `crosshead convert`. The loss on TEXT is in nats per token, in windows that do not overlap, in
float32. Output: JSON lines. A case is METHOD:COUNT, METHOD:KEYS,VALUES, METHOD:COUNT/GROUPS, auto:BUDGET, active:PART,
mixture:ACTIVE, differential:VERSION (version 1 with half_values) or pooled:COUNT (means of neighbouring KV heads, as
in the paper on grouped-query attention), optionally followed by :DTYPE for the dtype of the result. Examples: svd:2
aligned:2 aligned:2:bfloat16 aligned:2,3 aligned:4/2 auto:0.75 active:0.75 mixture:7:paper differential:2. With
aligned:4/auto, the conversion chooses the number of groups.

Without `--calibration`, the conversion calibrates on its default text. `--part 0.5:1` reads only the second half of
TEXT. `--out` adds the results to a JSON file under the key `--name`.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

import crosshead
from crosshead.common.errors import ConversionError
from crosshead.common.plain_text import read_text
from crosshead.conversion.calibration.text import windows
from crosshead.evals.bench.machine import machine


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--part", default="0:1", help="part of TEXT to read, START:END between 0 and 1")
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--calibration-part", default="0:1")
    parser.add_argument("--device", default="cpu", help="device on which the conversion runs the model")
    parser.add_argument("--length", type=int, default=1024, help="tokens per window")
    parser.add_argument(
        "--windows", type=int, default=10**6, help="maximum number of windows, evenly spaced in the text"
    )
    parser.add_argument("--out", type=Path, help="JSON file to which the results are added")
    parser.add_argument("--name", help="key of the results in that file")
    options = parser.parse_args()
    if (options.out is None) != (options.name is None):
        parser.error("--out and --name go together: give both or neither")
    return options


def part_of(text: str, part: str) -> str:
    start, end = (float(bound) for bound in part.split(":"))
    return text[int(len(text) * start) : int(len(text) * end)]


def request(case: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments `mixers` and further options of `crosshead.convert` for a case."""
    method, value, dtype = [*case.split(":"), "float32"][:3]
    if method == "mixture":
        router_method = "paper" if dtype == "paper" else "calibrated"
        return {"mixture": {"active_heads": int(value), "method": router_method}}, {"dtype": "float32"}
    if method == "differential":
        return {"differential": {"version": value, "half_values": value == "1"}}, {"dtype": dtype}
    if method == "active":
        return {"mixture": {}}, {"active": value, "dtype": dtype}
    if method == "auto":
        return {"explicit": {}}, {"layers": "auto", "budget": float(value), "dtype": dtype}
    counts, groups = [*value.split("/"), "1"][:2]
    keys, values = (counts.split(",") * 2)[:2]
    options = {"key_heads": keys, "value_heads": values, "method": method}
    return {"explicit": options | ({} if groups == "auto" else {"groups": groups})}, {"dtype": dtype}


DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
"""Device on which losses are computed."""


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(DEVICE)


@torch.no_grad()
def pooled(folder: Path, heads: int) -> Any:
    """Load a neutral conversion, and replace its KV heads by means of neighbouring heads, `heads` different ones."""
    model = loaded(folder)
    size, every = model.config.head_dim, model.config.num_key_value_heads // heads
    for layer in model.model.layers:
        for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            for parameter in projection.parameters():
                means = parameter.unflatten(0, (heads, every, size)).mean(1, keepdim=True)
                parameter.copy_(means.expand(-1, every, *means.shape[2:]).flatten(0, 2))
    return model


@torch.no_grad()
def loss(model: Any, tokens: torch.Tensor) -> float:
    total = 0.0
    for window in tokens.to(DEVICE).split(1):
        total += float(functional.cross_entropy(model(window).logits[0, :-1], window[0, 1:]))
    return total / len(tokens)


def add(path: Path, name: str, results: dict[str, Any]) -> None:
    """Add results to the JSON file under the key `name`; earlier results with this key are replaced."""
    report = json.loads(path.read_bytes()) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report | {name: results}, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory() as scratch:
        text, neutral, out = Path(scratch, "calibration.txt"), Path(scratch, "neutral"), Path(scratch, "out")
        if options.calibration is not None:
            text.write_text(
                part_of(read_text(options.calibration, ConversionError), options.calibration_part), encoding="utf-8"
            )
        crosshead.convert(options.model, neutral, {"explicit": {}}, dtype="float32", verify=False)
        tokenizer = AutoTokenizer.from_pretrained(neutral)
        prose = part_of(read_text(options.text, ConversionError), options.part)
        tokens = windows(tokenizer, prose, options.length, options.windows, len(tokenizer))
        source = loss(loaded(neutral), tokens)
        calibration = None if options.calibration is None else options.calibration.name
        results: dict[str, Any] = {"source": round(source, 4), "windows": len(tokens), "length": options.length}
        results |= {"text": options.text.name, "part": options.part, "calibration": calibration}
        results |= {"calibration_part": options.calibration_part if calibration else None, "cases": {}}
        environment = {"device": options.device, "machine": machine()}
        print(json.dumps({"source": options.model, "windows": len(tokens), "loss": round(source, 4)}), flush=True)
        for case in options.cases:
            started = time.perf_counter()
            if case.startswith("pooled:"):
                model, report = pooled(neutral, int(case.partition(":")[2])), dict[str, Any]()
            else:
                mixers, convert_options = request(case)
                convert_options["device"] = options.device
                reads_text = not case.startswith(("svd", "differential")) and not case.endswith("paper")
                if options.calibration is not None and reads_text:
                    convert_options["calibration"] = text
                report = crosshead.convert(options.model, out, mixers, verify=False, overwrite=True, **convert_options)
                model = loaded(out)
            seconds = time.perf_counter() - started
            above = round(loss(model, tokens) - source, 4)
            chosen = report.get("chosen", {})
            names = {"key": "key_heads", "value": "value_heads", "active": "active_heads", "groups": "groups"}
            chosen = {short: chosen[name] for short, name in names.items() if name in chosen}
            result = {"above_source": above, "seconds": round(seconds, 1)} | chosen
            print(json.dumps({"case": case} | result), flush=True)
            results["cases"][case] = result | environment
            if options.out is not None:
                add(options.out, options.name, results)


if __name__ == "__main__":
    main()
