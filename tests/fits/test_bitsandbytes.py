"""4-bit weights of bitsandbytes, and LoRA with them (QLoRA): mechanisms stay in full precision and are trained."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from toys import CASES, mixed_model, tokens

bitsandbytes = pytest.importorskip(
    "bitsandbytes", reason="bitsandbytes is not installed: `make test-quantized` runs these tests with it"
)
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("case", CASES)]

CONFIG = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
PROJECTIONS = [f"self_attn.{side}_proj" for side in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]


def load_model(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **options)


@pytest.fixture
def model_folder(case: str, tmp_path: Path) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}  # whole blocks of 64 weights
    mixed_model("Llama", CASES[case], **sizes).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def four_bit_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Name -> module of the layers with 4-bit weights."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, bitsandbytes.nn.Linear4bit)}


@torch.no_grad()
def test_only_projections_get_four_bit_weights(case: str, model_folder: Path, tmp_path: Path) -> None:
    model, expected = load_model(model_folder, quantization_config=CONFIG), load_model(model_folder)
    model.save_pretrained(tmp_path / "small")  # before a forward pass, which repacks the weights on a CPU
    layers = four_bit_layers(model)
    assert set(layers) == {f"model.layers.{layer}.{name}" for layer in range(2) for name in PROJECTIONS}
    for name, parameter in expected.named_parameters():
        weight = model.get_parameter(name)
        if (layer := name.removesuffix(".weight")) in layers:
            parameter.copy_(bitsandbytes.functional.dequantize_4bit(weight, weight.quant_state))
            assert layers[layer].bias is None
        else:
            assert torch.equal(weight, parameter), name
    logits, expected = model(tokens()).logits, expected(tokens()).logits
    assert (logits - expected).norm() / expected.norm() < 0.03  # the CPU kernels of bitsandbytes multiply in bfloat16
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    written = model.generate(tokens(), **options)
    assert torch.equal(written, model.generate(tokens(), use_cache=False, **options))
    torch.testing.assert_close(load_model(tmp_path / "small")(tokens()).logits, logits)


def test_qlora_trains_only_lora_and_mechanism_parameters(case: str, model_folder: Path) -> None:
    """Parameters of the mechanism and of LoRA are trained; 4-bit weights and all others do not change."""
    model = prepare_model_for_kbit_training(load_model(model_folder, quantization_config=CONFIG))
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=list(CASES[case]))
    adapted = get_peft_model(model, lora).train()
    parameters = dict(adapted.named_parameters())
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    assert all("lora_" in name or "modules_to_save" in name for name in trained)
    assert any("modules_to_save" in name for name in trained) or not CASES[case]
    before = copy.deepcopy({name: parameter.detach() for name, parameter in parameters.items()})
    optimizer = torch.optim.AdamW([parameters[name] for name in trained], lr=0.02)
    losses = []
    for _ in range(4):
        loss = adapted(tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert {name for name, parameter in parameters.items() if not torch.equal(parameter, before[name])} == trained
