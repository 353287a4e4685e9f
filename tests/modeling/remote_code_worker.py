"""Loads a saved model by its remote code, in a process without crosshead, and saves its logits.

Argument: a folder that contains `model` and the inputs (`inputs.safetensors`, tensor `ids`: token ids or images); the
logits are saved there as `outputs.safetensors`.
"""

import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig


@torch.no_grad()
def main(folder: Path) -> None:
    """Load the model, run it once, and save its logits."""
    options = {"trust_remote_code": True, "attn_implementation": "eager"}
    config = AutoConfig.from_pretrained(folder / "model", **options)
    served, second_head = config.auto_map, config.architectures[0].endswith("ForPreTraining")
    tasks = (
        *(["AutoModelForPreTraining"] if second_head else []),
        "AutoModelForCausalLM",
        "AutoModelForMaskedLM",
        "AutoModelForImageClassification",
        "AutoModelForSeq2SeqLM",
    )
    auto_class = next(task for task in tasks if task in served)
    model = getattr(transformers, auto_class).from_pretrained(folder / "model", **options).eval()
    if not type(model).__module__.startswith("transformers_modules"):
        raise SystemExit(f"{type(model)} is not remote code")
    ids = load_file(folder / "inputs.safetensors")["ids"]
    decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    outputs = model(ids, **decoder)
    save_file({"logits": outputs["prediction_logits" if second_head else "logits"]}, folder / "outputs.safetensors")


if __name__ == "__main__":
    sys.modules["crosshead"] = None  # type: ignore[assignment]  # any import of it fails
    main(Path(sys.argv[1]))
