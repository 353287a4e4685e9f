"""The expert selection bias of Qwen3-MoE: compared with the equations and the stock router; saving and loading."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

import crosshead
from crosshead.modeling.backbones.qwen3_moe import EXPERT_BIAS, BiasedRouter
from toys import lopsided, mixed_config, mixed_model, stock_model, tokens

KNOCKING = {"knocking": {"form": "linear"}}
NAMES = {f"model.layers.{layer}.mlp.gate.{EXPERT_BIAS}" for layer in (0, 1)}
VALUES = torch.tensor([0.3, -0.4, 0.001, -0.2])


def model_of(**changes: Any) -> Any:
    """Return a toy with expert biases of zero."""
    return mixed_model("Qwen3Moe", {}, expert_bias=True, **changes)


def routers(model: Any) -> list[BiasedRouter]:
    """Return the biased routers of all layers."""
    return [module for module in model.modules() if isinstance(module, BiasedRouter)]


def biased_model(**changes: Any) -> Any:
    """Return a toy whose expert biases change the selected experts."""
    model = model_of(**changes)
    for index, router in enumerate(routers(model)):
        router.e_score_correction_bias.copy_(VALUES.roll(index))
    return model


def moe_block_oracle(
    hidden: torch.Tensor, block: Any, bias: torch.Tensor, chosen: int, normalised: bool
) -> torch.Tensor:
    """Return the output of one MoE block, token by token: biased probabilities select, unbiased ones weigh."""
    rows = []
    for token in hidden:
        logits = block.gate.weight @ token
        shares = torch.exp(logits - logits.max()) / torch.exp(logits - logits.max()).sum()
        order = sorted(range(len(bias)), key=lambda expert: -(shares[expert] + bias[expert]).item())[:chosen]
        total = sum(shares[expert] for expert in order) if normalised else 1.0
        row = torch.zeros_like(token)
        for expert in order:
            gate, up = (block.experts.gate_up_proj[expert] @ token).chunk(2)
            row = row + shares[expert] / total * (block.experts.down_proj[expert] @ (gate * torch.sigmoid(gate) * up))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("normalised", (True, False))
@pytest.mark.parametrize("chosen", (1, 2, 3))
def test_moe_block_with_bias_follows_the_oracle(chosen: int, normalised: bool) -> None:
    """Compares outputs and gradients; tolerances are those of float32, in which transformers computes the softmax."""
    model = biased_model(num_experts_per_tok=chosen, norm_topk_prob=normalised).double()
    model.set_experts_implementation("eager")
    block = model.model.layers[1].mlp
    hidden = torch.randn(40, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    direction = torch.randn(40, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    leaves = [hidden, *block.parameters()]
    result = block(hidden[None])[0]
    truth = moe_block_oracle(hidden, block, VALUES.roll(1).double(), chosen, normalised)
    assert not torch.allclose(result, moe_block_oracle(hidden, block, torch.zeros(4), chosen, normalised), rtol=1e-2)
    assert (result - truth).abs().max() < 1e-6 * truth.abs().max()
    both = [torch.autograd.grad((output * direction).sum(), leaves) for output in (result, truth)]
    for ours, expected in zip(*both, strict=True):
        assert (ours - expected).abs().max() <= 2e-6 * max(1.0, expected.abs().max())


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("normalised", (True, False))
def test_zero_bias_equals_stock_model(normalised: bool, dtype: torch.dtype) -> None:
    changes = {"norm_topk_prob": normalised, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    models = [model.to(dtype) for model in (stock_model("Qwen3Moe", **changes), model_of(**changes))]
    ids = tokens()
    stock, ours = (model(ids, labels=ids) for model in models)
    assert torch.equal(ours.logits, stock.logits) and torch.equal(ours.loss, stock.loss)
    assert all(map(torch.equal, ours.router_logits, stock.router_logits))
    for output in (stock, ours):
        output.loss.backward()
    stock_parameters = dict(models[0].named_parameters())
    for name, parameter in models[1].named_parameters():
        assert torch.equal(parameter.grad, stock_parameters[name].grad), name


def test_disabled_bias_adds_no_tensor_or_config_key(tmp_path: Path) -> None:
    model = mixed_model("Qwen3Moe", KNOCKING)
    assert not routers(model) and not any(EXPERT_BIAS in name for name in model.state_dict())
    model.save_pretrained(tmp_path)
    assert "expert_bias" not in json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert AutoConfig.from_pretrained(tmp_path).expert_bias is False


def test_dense_layers_have_no_bias() -> None:
    model = mixed_model("Qwen3Moe", {}, expert_bias=True, mlp_only_layers=[0])
    assert {name for name in model.state_dict() if EXPERT_BIAS in name} == {f"model.layers.1.mlp.gate.{EXPERT_BIAS}"}


@pytest.mark.oldest
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@torch.no_grad()
def test_bias_is_saved_and_loaded_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    """Covers every model dtype; the model is loaded through an Auto class."""
    biased_model().save_pretrained(tmp_path / "float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "float32", dtype=dtype)
    model.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text(encoding="utf-8"))["expert_bias"] is True
    with safe_open(tmp_path / "saved" / "model.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys() if EXPERT_BIAS in name}  # noqa: SIM118
    assert stored.keys() == NAMES and all(tensor.dtype == torch.float32 for tensor in stored.values())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.dtype == dtype and torch.equal(again(tokens()).logits, model(tokens()).logits)
    for index, router in enumerate(routers(again)):
        assert router.e_score_correction_bias.dtype == torch.float32
        assert torch.equal(router.e_score_correction_bias, VALUES.roll(index))


@torch.no_grad()
def test_bias_from_stock_checkpoint_starts_at_zero(tmp_path: Path) -> None:
    stock = stock_model("Qwen3Moe")
    stock.save_pretrained(tmp_path)
    model, report = crosshead.CrossheadQwen3MoeForCausalLM.from_pretrained(
        tmp_path, expert_bias=True, attn_implementation="eager", output_loading_info=True
    )
    assert set(report["missing_keys"]) == NAMES
    assert all(torch.equal(router.e_score_correction_bias, torch.zeros(4)) for router in routers(model))
    assert torch.equal(model(tokens()).logits, stock(tokens()).logits)


@torch.no_grad()
def test_bias_stays_float32_after_meta_init_and_dtype_casts() -> None:
    config = mixed_config("Qwen3Moe", {}, expert_bias=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert {router.e_score_correction_bias.dtype for router in routers(model)} == {torch.float32}
    model = lopsided(model.to_empty(device="cpu"))
    model.load_state_dict(biased_model().state_dict())
    moved = copy.deepcopy(model).half().bfloat16().float().double()
    for router, index in zip(routers(moved), (0, 1), strict=True):
        assert torch.equal(router.e_score_correction_bias, VALUES.roll(index))


def test_offloaded_model_gives_the_same_logits(tmp_path: Path) -> None:
    model = biased_model()
    model.save_pretrained(tmp_path)
    device_map = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    device_map |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map=device_map, offload_folder=tmp_path / "offloaded", attn_implementation="eager"
    )
    with torch.no_grad():
        assert torch.equal(again(tokens()).logits, model(tokens()).logits)


@pytest.mark.parametrize("wrong", ("yes", 1, None))
def test_non_boolean_expert_bias_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"expert_bias={wrong!r}"):
        mixed_config("Qwen3Moe", {}, expert_bias=wrong)


def test_bias_is_float32_under_deepspeed_zero_init(monkeypatch):
    """DeepSpeed's `zero.Init` creates tensors in its own dtype and ignores `dtype=`."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, **options: zeros(*size, **options).bfloat16())
    assert {router.e_score_correction_bias.dtype for router in routers(biased_model())} == {torch.float32}
    monkeypatch.undo()
    rounded = biased_model()
    for router in routers(rounded):
        router._buffers["e_score_correction_bias"] = torch.full((4,), 0.5, dtype=torch.bfloat16)
    assert {router.e_score_correction_bias.dtype for router in routers(rounded.to(torch.bfloat16))} == {torch.float32}
