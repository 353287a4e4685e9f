"""Features of the stock backbones are preserved: RoPE types, windows, tied embeddings, biases, expert layout."""

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import crosshead
from tiers import first, grid
from toys import BACKBONES, CASES, STOCK, lopsided, mixed_model, stock_model, tokens

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 2.0, "original_max_position_embeddings": 64},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 3.0, 4.0],
    },
    "proportional": {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
KNOCKING = {"knocking": {"form": "linear", "on": ["query", "key", "value"]}}
EXPLICIT = {"explicit": {"norm": False}}


def stock_and_crosshead_model(backbone: str, folder: Path, mixers: dict[str, Any], **changes: Any) -> tuple[Any, Any]:
    """Return a stock model, and the crosshead model loaded from its checkpoint."""
    stock = stock_model(backbone, **changes)
    stock.save_pretrained(folder)
    model_class = getattr(crosshead, f"Crosshead{backbone}ForCausalLM")
    return stock, model_class.from_pretrained(folder, mixers=mixers, attn_implementation="eager").eval()


def test_rope_table_covers_every_transformers_rope_type() -> None:
    assert set(ROPES) == {"default", *ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize(("rope", "backbone"), grid(ROPES, BACKBONES, strength=1))
@torch.no_grad()
def test_every_rope_type_gives_stock_logits(rope: str, backbone: str, tmp_path: Path) -> None:
    stock, ours = stock_and_crosshead_model(backbone, tmp_path, KNOCKING, rope_parameters=ROPES[rope])
    long = tokens(1, 100)  # longer than the original_max_position_embeddings of the scaled types
    assert torch.equal(ours(long).logits, stock(long).logits)
    explicit = type(ours).from_pretrained(tmp_path, mixers=EXPLICIT, attn_implementation="eager").eval()
    expected = stock(long).logits
    assert (explicit(long).logits - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("backbone", ("Qwen2", "Qwen3", "Qwen3Moe"))
@torch.no_grad()
def test_sliding_window_layers_give_stock_logits(backbone: str, tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    stock, ours = stock_and_crosshead_model(backbone, tmp_path, KNOCKING, **window)
    assert torch.equal(ours(tokens()).logits, stock(tokens()).logits)


@pytest.mark.oldest
@pytest.mark.parametrize(("tied", "backbone"), grid((True, False), BACKBONES, strength=1))
@torch.no_grad()
def test_embedding_tying_survives_save_and_load(tied: bool, backbone: str, tmp_path: Path) -> None:
    stock, ours = stock_and_crosshead_model(backbone, tmp_path / "stock", KNOCKING, tie_word_embeddings=tied)
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) is tied
    assert torch.equal(ours(tokens()).logits, stock(tokens()).logits)
    ours.save_pretrained(tmp_path / "ours")
    with safe_open(tmp_path / "ours" / "model.safetensors", "pt") as saved:
        assert ("lm_head.weight" in saved.keys()) is not tied  # noqa: SIM118
    again = type(ours).from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    assert torch.equal(again(tokens()).logits, stock(tokens()).logits)


@pytest.mark.parametrize("backbone", ("Llama", "Qwen3", "Qwen3Moe"))
def test_attention_bias(backbone: str) -> None:
    model = mixed_model(backbone, {"explicit": {"key_heads": 1, "value_heads": 1}}, attention_bias=True)
    attention = model.model.layers[0].self_attn
    assert attention.k_proj.bias.shape == attention.v_proj.bias.shape == (8,)
    assert attention.q_proj.bias is not None


def test_qwen2_explicit_projections_have_biases() -> None:
    attention = mixed_model("Qwen2", {"explicit": {"key_heads": 1, "value_heads": 1}}).model.layers[0].self_attn
    assert attention.k_proj.bias.shape == attention.v_proj.bias.shape == (8,)
    assert attention.o_proj.bias is None


def saved_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors in a saved folder."""
    with safe_open(folder / "model.safetensors", "pt") as saved:
        return {name: tuple(saved.get_slice(name).get_shape()) for name in saved.keys()}  # noqa: SIM118


@pytest.mark.oldest
@torch.no_grad()
def test_saved_experts_keep_stock_tensor_layout(tmp_path: Path) -> None:
    stock, ours = stock_and_crosshead_model("Qwen3Moe", tmp_path / "stock", KNOCKING)
    ours.save_pretrained(tmp_path / "ours")
    saved = saved_shapes(tmp_path / "ours")
    assert {name: shape for name, shape in saved.items() if ".mixers." not in name} == saved_shapes(tmp_path / "stock")
    back = STOCK["Qwen3Moe"][1].from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    assert torch.equal(back(tokens()).logits, stock(tokens()).logits)
    fresh = lopsided(type(ours)(ours.config))
    fresh.save_pretrained(tmp_path / "fresh")
    assert saved_shapes(tmp_path / "fresh") == saved
    again, report = type(ours).from_pretrained(
        tmp_path / "fresh", attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert torch.equal(again.eval()(tokens()).logits, fresh.eval()(tokens()).logits)


def test_expert_aux_loss_equals_stock(tmp_path: Path) -> None:
    stock, ours = stock_and_crosshead_model("Qwen3Moe", tmp_path, KNOCKING, output_router_logits=True)
    expected, output = stock(tokens(), labels=tokens()), ours(tokens(), labels=tokens())
    assert torch.equal(output.loss, expected.loss)
    assert torch.equal(output.aux_loss, expected.aux_loss)
    assert len(output.router_logits) == len(expected.router_logits) == 2


@pytest.mark.parametrize("written_as", ("num_experts", "num_local_experts"))
def test_num_experts_override_replaces_either_field_name(written_as: str) -> None:
    saved = mixed_model("Qwen3Moe", KNOCKING).config.to_dict()
    saved = {name: value for name, value in saved.items() if name not in ("num_experts", "num_local_experts")}
    changed = crosshead.CrossheadQwen3MoeConfig.from_dict(saved | {written_as: 4}, num_experts=8)
    assert changed.num_experts == changed.to_dict()["num_local_experts"] == 8


@pytest.mark.parametrize("backbone", first(BACKBONES))
@torch.no_grad()
def test_num_hidden_layers_override_truncates_checkpoint(backbone: str, tmp_path: Path) -> None:
    stock, ours = stock_and_crosshead_model(backbone, tmp_path, KNOCKING)
    shorter = (
        type(ours).from_pretrained(tmp_path, mixers=KNOCKING, num_hidden_layers=1, attn_implementation="eager").eval()
    )
    stock.model.layers = stock.model.layers[:1]
    stock.config.num_hidden_layers = 1
    assert torch.equal(shorter(tokens()).logits, stock(tokens(), use_cache=False).logits)


@pytest.mark.parametrize(("other", "backbone"), list(permutations(BACKBONES, 2)))
def test_checkpoint_of_another_backbone_is_refused(other: str, backbone: str, tmp_path: Path) -> None:
    """Without this refusal the Llama class, for example, would load a Qwen2 checkpoint and drop its biases."""
    stock_model(other).save_pretrained(tmp_path / "stock")
    mixed_model(other, KNOCKING).save_pretrained(tmp_path / "ours")
    model_class = getattr(crosshead, f"Crosshead{backbone}ForCausalLM")
    for folder in ("stock", "ours"):
        with pytest.raises(ValueError, match=f"model_type=.*Crosshead{backbone}Config "):
            model_class.from_pretrained(tmp_path / folder)


@pytest.mark.parametrize("case", CASES)
def test_mechanisms_contain_no_nn_linear(case: str) -> None:
    """Quantisers replace every nn.Linear before new mechanism parameters of a stock checkpoint are initialised."""
    for layer in mixed_model("Llama", CASES[case]).model.layers:
        modules = layer.self_attn.mixers.modules()
        assert not any(isinstance(module, torch.nn.Linear) for module in modules)
