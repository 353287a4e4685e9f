"""Conversions to `differential` that start with the source's outputs."""

import pytest
import torch
from transformers import AutoConfig

import crosshead
import toys
from crosshead.common.errors import ConversionError
from tiers import grid
from toy_checkpoints import write_stock

PAIRED = {
    "version 2": {"version": 2},
    "half values": {"half_values": "true"},
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
