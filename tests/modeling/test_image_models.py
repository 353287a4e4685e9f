"""Vision transformers: mechanisms over patches, loaded from stock checkpoints and by remote code."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import crosshead
import oracles
from oracle_arithmetic import LayerShape
from oracle_layers import GRADIENT_TOLERANCE, OUTPUT_TOLERANCE, gradients, oracle_view
from tiers import grid
from toys import ENCODER_CASES, IMAGE_SIZES, NEUTRAL, lopsided

BACKBONES = ("ViT", "DeiT", "Dinov2")
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))
LABELS = torch.tensor([0, 2])
CASES = ENCODER_CASES | {"a budget for each layer": {"mixture": {"active_heads": [3, 4], "shared_heads": 2}}}
for_each_case = pytest.mark.parametrize(("backbone", "case"), grid(BACKBONES, CASES, strength=1))


def image_model(backbone: str, mixers: dict[str, Any], backend: str = "eager") -> Any:
    """Return a tiny crosshead image classifier with lopsided weights."""
    config = getattr(crosshead, f"Crosshead{backbone}Config")(**IMAGE_SIZES, mixers=mixers)
    config._attn_implementation = backend
    return lopsided(getattr(crosshead, f"Crosshead{backbone}ForImageClassification")(config)).eval()


def oracle_parameters(attention: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of a layer by their names in the newest transformers release."""
    names = {"attention.": "", "query.": "q_proj.", "key.": "k_proj.", "value.": "v_proj.", "output.dense.": "o_proj."}
    parameters = {}
    for name, part in attention.named_parameters():
        for old, new in names.items():
            name = new + name.removeprefix(old) if name.startswith(old) else name
        parameters[name] = part
    return parameters


@for_each_case
def test_attention_follows_the_oracle(backbone: str, case: str) -> None:
    model = image_model(backbone, CASES[case]).double()
    base, config = model.base_model, model.config
    attention = (base.encoder.layer if backbone == "Dinov2" else base.layers)[1].attention
    inputs = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    inputs.requires_grad_()
    mixers, _ = oracle_view(config, 1)
    shape = LayerShape(4, 4, 8, 1, config.layer_norm_eps, has_qk_norm=False)
    allowed = torch.ones(2, 7, 7, dtype=torch.bool)
    expected, _ = oracles.attention_layer(inputs, oracle_parameters(attention), shape, mixers, None, None, allowed)
    assert expected.abs().max() > 0.1
    named = {"inputs": inputs, **dict(attention.named_parameters())}
    truth = gradients(expected, named)
    for backend in ("eager", "sdpa"):
        model.set_attn_implementation(backend)
        result = attention(inputs)
        output = result[0] if isinstance(result, tuple) else result  # older transformers return a tuple
        assert (output - expected).abs().max() < OUTPUT_TOLERANCE, backend
        for name, gradient in gradients(output, named).items():
            assert (gradient - truth[name]).abs().max() < GRADIENT_TOLERANCE, (backend, name)


@pytest.mark.oldest
@pytest.mark.parametrize(("backbone", "mechanism"), grid(BACKBONES, [name for name in NEUTRAL if NEUTRAL[name]]))
@torch.no_grad()
def test_neutral_start_is_the_stock_model(backbone: str, mechanism: str, tmp_path: Path) -> None:
    """transformers saves the tensor names of its earlier releases; crosshead loads them."""
    config = getattr(transformers, f"{backbone}Config")(**IMAGE_SIZES)
    stock = lopsided(getattr(transformers, f"{backbone}ForImageClassification")(config)).eval()
    stock.save_pretrained(tmp_path)
    assert any(
        ".encoder.layer.0.attention.attention.query." in name for name in load_file(tmp_path / "model.safetensors")
    )
    ours_class = getattr(crosshead, f"Crosshead{backbone}ForImageClassification")
    for backend in ("eager", "sdpa"):
        stock.set_attn_implementation(backend)
        for mixers in NEUTRAL[mechanism]:
            ours = ours_class.from_pretrained(tmp_path, mixers=mixers, attn_implementation=backend).eval()
            difference = (ours(IMAGES).logits - stock(IMAGES).logits).abs().max()
            # Blockwise talking sums in another order.
            assert difference <= (1e-5 if (mechanism, backend) == ("talking", "sdpa") else 0)


@pytest.mark.oldest
@for_each_case
@torch.no_grad()
def test_saved_model_loads_by_auto_class_and_remote_code(
    backbone: str, case: str, warm_process: Any, tmp_path: Path
) -> None:
    model, environment = image_model(backbone, CASES[case]), os.environ | {"HF_HUB_OFFLINE": "1"}
    model.save_pretrained(tmp_path / "model")
    again = transformers.AutoModelForImageClassification.from_pretrained(
        tmp_path / "model", attn_implementation="eager"
    )
    assert torch.equal(again.eval()(IMAGES).logits, model(IMAGES).logits)
    save_file({"ids": IMAGES}, tmp_path / "inputs.safetensors")
    worker = Path(__file__).with_name("remote_code_worker.py")
    command = [sys.executable, "-P", str(worker), str(tmp_path)]
    done = warm_process.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert torch.equal(load_file(tmp_path / "outputs.safetensors")["logits"], model(IMAGES).logits)


@for_each_case
def test_every_new_parameter_gets_a_gradient(backbone: str, case: str) -> None:
    model = image_model(backbone, CASES[case]).train()
    out = model(IMAGES, labels=LABELS)
    out.loss.backward()
    for name, parameter in model.named_parameters():
        if ".mixers." in name:
            assert parameter.grad.abs().max() > 0, name
    if "mixture" in CASES[case]:
        plain = torch.nn.functional.cross_entropy(out.logits, LABELS)
        assert torch.allclose(out.loss - plain, 0.01 * out.balance_loss, atol=1e-6)
    else:
        assert out.balance_loss is None
