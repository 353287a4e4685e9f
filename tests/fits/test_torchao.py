"""8-bit weights of torchao: projections are quantised, the parameters of mechanisms are not."""

import pytest
import torch
from transformers import AutoModelForCausalLM, TorchAoConfig

from toys import CASES, mixed_model, tokens

quantization = pytest.importorskip(
    "torchao.quantization", reason="torchao is not installed: `make test-quantized` runs these tests with it"
)
pytestmark = pytest.mark.slow

PROJECTIONS = [f"self_attn.{side}_proj" for side in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]


def load_model(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **options)


@pytest.fixture
def model_folder(case, tmp_path):
    mixed_model("Llama", CASES[case]).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_only_projections_get_eight_bit_weights(case, model_folder, tmp_path):
    plain = load_model(model_folder)
    config = TorchAoConfig(quantization.Int8WeightOnlyConfig(version=2))
    model = load_model(model_folder, quantization_config=config, device_map="cpu")
    small = {name for name, parameter in model.named_parameters() if type(parameter) is not torch.nn.Parameter}
    assert small == {f"model.layers.{layer}.{name}.weight" for layer in range(2) for name in PROJECTIONS}
    stored = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert name in small or torch.equal(parameter, stored[name]), name
    expected, logits = plain(tokens()).logits, model(tokens()).logits
    assert 1e-4 < (logits - expected).norm() / expected.norm() < 0.15  # differences of heads enlarge the rounding
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    written = model.generate(tokens(), **options)
    assert torch.equal(written, model.generate(tokens(), use_cache=False, **options))
    model.save_pretrained(tmp_path / "small")
    assert torch.equal(load_model(tmp_path / "small")(tokens()).logits, logits)
