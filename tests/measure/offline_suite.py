"""Scores a real model, the same model with random weights, and the model without one layer on the offline suite.

usage: python -P tests/measure/offline_suite.py MODEL FOLDER [--layer 15] [--seed 0]

MODEL is a GGUF file or the folder of a stock model. Writes the two copies and the results, eval.json, to FOLDER, and
prints the table of `crosshead eval --compare`.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import crosshead


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layer", type=int, default=15, help="layer to disable")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    return parser.parse_args()


def stock(model: Path, folder: Path) -> Path:
    """The folder of the stock model; a GGUF file is converted to one in `folder`."""
    if model.is_dir():
        return model
    if not (folder / "model").exists():
        crosshead.convert(model, folder / "mixed", {"knocking": {"form": "linear"}}, dtype="float32", verify=False)
        crosshead.fold(folder / "mixed", folder / "model", verify=False)
    return folder / "model"


@torch.no_grad()
def write_copies(model: Path, folder: Path, layer: int, seed: int) -> list[str]:
    """Write a copy with random weights, and a copy in which one layer adds nothing; return their paths."""
    torch.manual_seed(seed)
    random = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.float32)
    without = AutoModelForCausalLM.from_pretrained(model)
    silent = without.model.layers[layer]
    silent.self_attn.o_proj.weight.zero_()
    silent.mlp.down_proj.weight.zero_()
    names = {"random": random, f"without_layer_{layer}": without}
    for name, copy in names.items():
        copy.save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(model).save_pretrained(folder / name)
    return [str(folder / name) for name in names]


def main() -> None:
    options = arguments()
    options.folder.mkdir(parents=True, exist_ok=True)
    model = stock(options.model, options.folder)
    models = [str(model), *write_copies(model, options.folder, options.layer, options.seed)]
    command = [sys.executable, "-P", "-m", "crosshead", "eval", *models, "--suite", "offline", "--compare"]
    sys.exit(subprocess.run([*command, "--out", options.folder / "eval.json", "--overwrite"], check=False).returncode)


if __name__ == "__main__":
    main()
