"""Writes a model folder for every case and backbone, with the results expected after loading it elsewhere.

usage: python write.py OUT [some|all]

`some` writes fewer combinations, in which every case and every backbone occurs at least once.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiers import covering
from toys import BACKBONES, CASES, lopsided, mixed_config, mixed_model, tokens


@torch.no_grad()
def write(out: Path, everything: bool) -> None:
    """Write language models for cases and backbones, classifiers, and a mixture of experts with an expert bias."""
    ids = tokens()
    for backbone, case in covering(BACKBONES, CASES, strength=2 if everything else 1):
        write_model(out / f"{backbone}-{case}", mixed_model(backbone, CASES[case]), ids)
    for backbone in BACKBONES if everything else BACKBONES[:1]:
        config = mixed_config(backbone, [*CASES.values()][-1])
        classifier = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
        lopsided(classifier).eval()
        classifier.save_pretrained(out / f"{backbone}-classifier" / "model")
        save_file({"ids": ids, "logits": classifier(ids).logits}, out / f"{backbone}-classifier/expected.safetensors")
    biased = mixed_model("Qwen3Moe", CASES["knocking"], expert_bias=True)
    for layer in biased.model.layers:
        layer.mlp.gate.e_score_correction_bias.copy_(torch.tensor([0.3, -0.4, 0.001, -0.2]))
    write_model(out / "Qwen3Moe-expert_bias", biased, ids)


def write_model(folder: Path, model: Any, ids: torch.Tensor) -> None:
    """Write a language model with its expected logits and generated tokens."""
    model.save_pretrained(folder / "model")
    generated = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    expected = {"ids": ids, "logits": model(ids).logits, "generated": generated}
    save_file(expected, folder / "expected.safetensors")
    (folder / "mixers.json").write_text(json.dumps(list(model.config.mixers)))


if __name__ == "__main__":
    write(Path(sys.argv[1]), everything=sys.argv[2:] != ["some"])
