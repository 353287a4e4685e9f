"""Converting, verifying and folding a GGUF file gives back the model that was written into the file."""

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import crosshead
import toys
from crosshead.conversion.gguf.store import OLDEST_TRANSFORMERS

gguf_toys = pytest.importorskip("gguf_toys", reason="gguf is not installed", exc_type=ImportError)


@pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST_TRANSFORMERS,
    reason="this transformers gets the tokenizers of GGUF files wrong",
)
@pytest.mark.parametrize("backbone", toys.BACKBONES)
def test_gguf_convert_and_fold_round_trip(backbone, tmp_path):
    changes = {"norm_topk_prob": True} if backbone == "Qwen3Moe" else {}  # as in every engine that reads GGUF
    model = gguf_toys.model(backbone, **changes)
    gguf = gguf_toys.write_model(tmp_path / "toy.gguf", model, backbone)
    report = crosshead.convert(gguf, tmp_path / "made", {"knocking": {"form": "linear"}})
    assert report["verification"]["greatest_logit_difference"] == 0
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32, attn_implementation="eager")
    assert torch.equal(made(toys.tokens()).logits, model(toys.tokens()).logits)
    crosshead.fold(tmp_path / "made", tmp_path / "back", verify=False)
    expected, stored = gguf_toys.stock_tensors(model), load_file(tmp_path / "back" / "model.safetensors")
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], expected[name]) for name in expected)
