"""Conversions to `differential` that start with the source's outputs."""

import pytest
import torch
from transformers import AutoConfig

import crosshead
import toys
from crosshead.common.errors import ConversionError
from crosshead.conversion.compress.initial_weights import pair_heads
from crosshead.modeling.mechanisms.differential import Differential
from tiers import grid
from toy_checkpoints import write_stock

PAIRED = {
    "version 2": {"version": 2},
    "half values": {"half_values": "True"},
    "half values, given": {"version": 1, "half_values": True, "norm": False},
}


@pytest.mark.oldest
@pytest.mark.parametrize(
    ("backbone", "case", "dtype"), grid(toys.BACKBONES, PAIRED, [torch.float32, torch.bfloat16], strength=1), ids=str
)
def test_differential_conversion_keeps_source_outputs(backbone, case, dtype, tmp_path):
    """The conversion itself checks logits and divergence against its tolerance."""
    source = write_stock(tmp_path / "source", backbone, dtype=dtype)
    report = crosshead.convert(source, tmp_path / "made", {"differential": PAIRED[case], "gating": {}})
    measured = report["verification"]
    assert measured["must_equal"] and measured["kl_divergence"] < (1e-6 if dtype == torch.float32 else 1e-2)
    assert measured["reload"]["greatest_logit_difference"] < 1e-4
    before, after = (measured[f"kv_bytes_per_token_{when}"] for when in ("before", "after"))
    assert after == (before if case == "version 2" else 1.5 * before)
    config = AutoConfig.from_pretrained(tmp_path / "made", trust_remote_code=True)
    assert (config.num_attention_heads, config.head_dim) == (8, 8)
    assert config.num_key_value_heads == (2 if case == "version 2" else 4)


@pytest.mark.parametrize("product", [-1.0, 0.3])
def test_half_values_start_with_a_factor_of_zero(product):
    """Also if exp(q1 . k1) + lambda_init is below 1, so that q2 . k2 must be negative."""
    config = toys.mixed_config("Llama", {"differential": {"half_values": True, "norm": False}})
    layout, options = config.layout_of_layer(0), config.mixers_of_layer(0)["differential"]
    mechanism = Differential(layout, options)
    created = {f"mixers.differential.{name}": tensor for name, tensor in mechanism.state_dict().items()}
    first, second = (torch.zeros(layout.head_dim) for _ in range(2))
    first[0], second[0] = 1.0, product
    prefix = "mixers.differential.lambda_"
    created |= {f"{prefix}q1": first, f"{prefix}k1": second}
    projections = {f"{name}_proj.weight": torch.zeros(32, 8) for name in "qk"}
    paired = created | pair_heads(projections, created, layout, mechanism)
    terms = [paired[f"{prefix}q{i}"].double() @ paired[f"{prefix}k{i}"].double() for i in (1, 2)]
    assert abs(terms[0].exp() - terms[1].exp() + mechanism.lambda_init) < 1e-6


@pytest.mark.parametrize("case", ["version 2", "half values"])
@pytest.mark.parametrize("backbone", ["Llama", "Qwen3"])
def test_all_parameters_get_gradients_in_second_step(case, backbone, tmp_path):
    """The second heads of pairs need one step before they get gradients."""
    source = write_stock(tmp_path / "source", backbone)
    crosshead.convert(source, tmp_path / "made", {"differential": PAIRED[case]}, verify=False)
    model = getattr(crosshead, f"Crosshead{backbone}ForCausalLM").from_pretrained(tmp_path / "made")
    optimizer, ids = torch.optim.SGD(model.parameters(), lr=0.1), toys.tokens()
    for _ in range(2):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.any(), name
    second = model.model.layers[0].self_attn.q_proj.weight.grad.unflatten(0, (-1, 2, 8))[:, 1]
    assert second.flatten(1).any(1).all()


@pytest.mark.parametrize(
    ("mixers", "words"),
    [
        ({"differential": {"version": 2}, "explicit": {}}, ("explicit", "knocking")),
        ({"differential": {"half_values": True}, "mixture": {"active_heads": 3, "method": "paper"}}, ("mixture",)),
        ({"differential": {"version": 2, "layers": [0]}}, ("differential.layers=[0]", "all layers")),
        ({"differential": {"version": 2, "layers": 0}}, ("mixers.differential.layers",)),
        ({"differential": {"version": 2, "layers": ["a", 0]}}, ("mixers.differential.layers",)),
        ({"differential": {"half_values": True, "norm": True}}, ("differential", "--allow-inexact")),
        ({"differential": {}}, ("differential", "--allow-inexact")),
        ({"differential": {"version": 3}}, ("version=3", "1 or 2")),
    ],
    ids=str,
)
def test_unsupported_differential_requests_are_refused(mixers, words, tmp_path):
    source = write_stock(tmp_path / "source")
    with pytest.raises(ConversionError) as raised:
        crosshead.convert(source, tmp_path / "made", mixers)
    assert all(word in str(raised.value) for word in words)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("layers", [None, [1, 0]])
def test_all_layers_may_be_named(layers, tmp_path):
    mixers = {"differential": {"version": 2, "layers": layers}}
    crosshead.convert(write_stock(tmp_path / "source"), tmp_path / "made", mixers, verify=False)
    config = AutoConfig.from_pretrained(tmp_path / "made", trust_remote_code=True)
    assert all("differential" in config.mixers_of_layer(layer) for layer in range(2))
