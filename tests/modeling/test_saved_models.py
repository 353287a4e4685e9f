"""Models saved by an earlier version still load and give the logits recorded then."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

SAVED = sorted(path for path in (Path(__file__).parent / "saved").iterdir())


@pytest.mark.oldest
@pytest.mark.parametrize("folder", SAVED, ids=lambda folder: folder.name)
@torch.no_grad()
def test_models_saved_by_version_0_1_give_recorded_logits(folder: Path) -> None:
    expected = load_file(folder / "logits.safetensors")["logits"]
    for implementation in ("sdpa", "eager"):
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation=implementation, output_loading_info=True
        )
        assert not any(report.values())
        assert (model(torch.arange(1, 12)[None]).logits - expected).abs().max() < 1e-5
