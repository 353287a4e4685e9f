"""Write a published folder of every case on every backbone, with what loading it elsewhere must give.

usage: python write.py OUT
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification

sys.path.insert(0, str(Path(__file__).parents[1]))

from toys import BACKBONES, CASES, lopsided, mixed_config, mixed_model, tokens


@torch.no_grad()
def write(out: Path) -> None:
    """One folder per case and backbone."""
    ids = tokens()
    for backbone in BACKBONES:
        for case, mixers in CASES.items():
            folder = out / f"{backbone}-{case}"
            model = mixed_model(backbone, mixers)
            model.save_pretrained(folder / "model")
            generated = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
            expected = {"ids": ids, "logits": model(ids).logits, "generated": generated}
            save_file(expected, folder / "expected.safetensors")
            (folder / "mixers.json").write_text(json.dumps(list(mixers)))
        config = mixed_config(backbone, mixers)
        classifier = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
        lopsided(classifier).eval()
        classifier.save_pretrained(out / f"{backbone}-classifier" / "model")
        save_file({"ids": ids, "logits": classifier(ids).logits}, out / f"{backbone}-classifier/expected.safetensors")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
