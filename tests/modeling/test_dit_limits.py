"""DiT: accepted and refused mixers, refused processors, and parameter counts."""

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from diffusers.models.attention_processor import AttnProcessor

from crosshead.modeling.dit import CrossheadDiTTransformer2DModel
from dit_toys import LABELS, LATENTS, MIXTURE, SIZES, TIMES, our_dit
from measure import training_tables

PAPER = {"S/2": (33, 33), "B/2": (130, 131), "L/2": (458, 459), "XL/2": (675, 676)}
"""Millions of parameters of DiT and MoH-DiT (MoH, table 2), per model size."""


@pytest.mark.parametrize("name", PAPER)
def test_parameter_counts_match_paper(name: str) -> None:
    (blocks, width, heads), (millions, routed_millions) = training_tables.SIZES[name], PAPER[name]
    stock, new = training_tables.parameters(blocks, width, heads)
    assert new == blocks * (heads + 2) * width
    assert round((stock + new) / 1e6) == routed_millions
    assert abs(stock / 1e6 - millions) < 0.52  # DiT-B/2 has 130.51 million, which its paper rounds down


@pytest.mark.parametrize(
    ("mixers", "words"),
    [
        ({"mixtures": {}}, "mixture"),
        ({"mixture": {}}, "mixers.mixture.active_heads"),
        ({"mixture": {"active_heads": 5}}, "active_heads=5"),
        ({"mixture": {"active_heads": [3]}}, "active_heads"),
        ({"explicit": {"norm": False}}, "mixers.explicit"),
        ({"differential": {}}, "mixers.differential"),
        ({"talking": {}}, "mixers.talking"),
        (["mixture"], "mixers"),
    ],
)
def test_unsupported_mixers_are_refused(mixers: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CrossheadDiTTransformer2DModel(**SIZES, mixers=mixers)


def test_replacing_attention_processor_is_refused() -> None:
    model = our_dit(MIXTURE)
    expected = model(LATENTS, TIMES, LABELS).sample
    attention = copy.deepcopy(model).transformer_blocks[1].attn1
    for exchange, name in (
        (model.disable_xformers_memory_efficient_attention, "AttnProcessor2_0"),
        (model.disable_xla_flash_attention, "AttnProcessor2_0"),
        (lambda: attention.set_attention_slice(1), "SlicedAttnProcessor"),
        (lambda: attention.set_processor(AttnProcessor()), "AttnProcessor"),
    ):
        with pytest.raises(ValueError, match=rf"set_processor\({name}\)"):
            exchange()
    with pytest.raises(ModuleNotFoundError, match="xformers"):
        model.enable_xformers_memory_efficient_attention()
    for block in model.transformer_blocks:
        block.attn1.fuse_projections()  # the stock processor does not use them either
    assert torch.equal(model(LATENTS, TIMES, LABELS).sample, expected)
    with pytest.raises(ValueError, match="hidden_states"):
        attention(torch.ones(1, 9, 32), attention_mask=torch.ones(1, 9))


def test_from_transformer_refuses_non_stock_models() -> None:
    for wrong in (our_dit(MIXTURE), torch.nn.Linear(2, 2)):
        with pytest.raises(TypeError, match=type(wrong).__name__):
            CrossheadDiTTransformer2DModel.from_transformer(wrong, MIXTURE)


def test_diffusers_is_optional() -> None:
    code = """
import sys, crosshead
assert not any(name.startswith("diffusers") for name in sys.modules)
sys.modules["diffusers"] = None
print("imported")
import crosshead.modeling.dit
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "imported\n"
    assert "pip install 'crosshead[diffusion]'" in done.stderr.strip().splitlines()[-1]
