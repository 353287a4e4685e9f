"""peft and the Trainer on all backbones except Llama-like decoders: LoRA plus fully trained mechanisms."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments

import crosshead
import image_toys
import toys
import transnext_toys
from tiers import first

MIXERS: dict[str, Any] = {"knocking": {}, "mixture": {"active_heads": 3, "shared_heads": 2}}
TARGETS = ["query", "value", "q", "v", "q_proj", "v_proj", "kv_b_proj"]
"""Names of the projections with LoRA, in all backbones."""
LANGUAGE = ["Gta", "DeepseekV3", "Bert", "T5", "DeepseekV2", "Albert"]
IMAGE = ["TransNext", "ViT", "Dinov2", "DeiT"]


def toy_model(backbone: str) -> Any:
    """Return a toy model with mechanisms, always with the same weights."""
    if backbone == "TransNext":
        return transnext_toys.model_of({"knocking": {}, "mixture": {"active_heads": 2, "shared_heads": 0}})
    if backbone in LANGUAGE:
        return toys.mixed_model(backbone, MIXERS)
    config = getattr(crosshead, f"Crosshead{backbone}Config")(**toys.IMAGE_SIZES, mixers=MIXERS)
    return toys.lopsided(getattr(crosshead, f"Crosshead{backbone}ForImageClassification")(config)).eval()


def labelled_inputs(backbone: str) -> dict[str, torch.Tensor]:
    """Return a batch with labels."""
    if backbone == "TransNext":
        return {"pixel_values": transnext_toys.IMAGES, "labels": transnext_toys.LABELS}
    if backbone in IMAGE:
        return {"pixel_values": image_toys.IMAGES, "labels": torch.tensor([0, 1])}
    return {"input_ids": toys.tokens(), "labels": toys.tokens()}


@pytest.mark.parametrize("backbone", first([*LANGUAGE, *IMAGE], 5))
def test_adapter_trains_saves_loads_and_merges(backbone: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    lora = LoraConfig(r=2, target_modules=TARGETS, modules_to_save=["mixture", "knocking"])
    model, inputs = get_peft_model(toy_model(backbone), lora).train(), labelled_inputs(backbone)
    named = dict(model.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    optimizer = torch.optim.AdamW((x for x in named.values() if x.requires_grad), lr=0.02, weight_decay=0)
    for _ in range(3):
        outputs = model(**inputs)
        assert outputs.balance_loss > 0
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = {name for name, parameter in named.items() if not torch.equal(parameter, before[name])}
    assert moved == {name for name, parameter in named.items() if parameter.requires_grad}
    assert {"lora_A", "mixers"} <= {part for name in moved for part in name.split(".")}

    model.eval().save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(toy_model(backbone), tmp_path).eval()
    with torch.no_grad():
        expected = model(**inputs).logits
        assert (expected - toy_model(backbone)(**inputs).logits).abs().max() > 1e-3
        torch.testing.assert_close(loaded(**inputs).logits, expected, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(loaded.merge_and_unload()(**inputs).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backbone", first(["Gta", "DeepseekV3", "DeepseekV2"], 1))
def test_trainer_lowers_loss_of_shared_rotary_decoders(backbone: str, tmp_path: Path) -> None:
    model = toy_model(backbone).train()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    rows = [{"input_ids": row, "labels": row} for row in toys.tokens(4)]
    options: dict[str, Any] = {"report_to": [], "use_cpu": True, "save_strategy": "no", "logging_steps": 1}
    arguments = TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=2, learning_rate=0.01, **options
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert all(not torch.equal(x, before[name]) for name, x in model.named_parameters() if "mixers" in name)
