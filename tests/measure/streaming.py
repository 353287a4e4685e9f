"""Measures the time and peak memory of conversions of a synthetic checkpoint of any size.

usage: PYTHONPATH=tests python -P tests/measure/streaming.py FOLDER [--gigabytes 8] [--rounds 3]

Measures the cases of `crosshead bench convert`, and also memory. FOLDER needs free space for three checkpoints. Prints
one JSON document, and writes it to FOLDER/streaming.json. Stop other processes before you measure times.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from crosshead.conversion.bench_convert import Synthetic
from crosshead.evals.bench.machine import machine
from crosshead.evals.bench.pairs import figures
from toy_checkpoints import character_tokenizer


def compare(checkpoint: Synthetic, rounds: int) -> dict[str, Any]:
    """Times of a neutral conversion and of `cp -r`, which alternate, and the peak memory of the conversion."""
    copies, conversions = [], []
    for _ in range(rounds):
        copies.append(checkpoint.copy())
        conversions.append(checkpoint.convert("neutral"))
    peak = max(conversion["peak_bytes"] for conversion in conversions)
    return figures([conversion["seconds"] for conversion in conversions], copies) | {"peak_bytes": peak}


def main() -> None:
    """Measure, and write and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True)
    checkpoint = Synthetic(arguments.folder, arguments.gigabytes)
    checkpoint.write(character_tokenizer().save_pretrained)
    result = {"bytes": checkpoint.size, "neutral": compare(checkpoint, arguments.rounds), "machine": machine()}
    result |= {name: checkpoint.convert(name) for name in ("calibration", "virtual-heads")}
    text = json.dumps(result, indent=2)
    (arguments.folder / "streaming.json").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
