"""Positions: a single token's queries and keys are turned in one go, and come out as the library turns them."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from crosshead.modeling.rotary import rotated


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("heads", ((4, 4), (6, 2), (3, 1)))
@pytest.mark.parametrize("tokens", (1, 2))
def test_the_same_bits_and_gradients(tokens: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    both = [torch.randn(3, count, tokens, 8).to(dtype).requires_grad_() for count in heads]
    angles = 100 * torch.rand(3, tokens, 8)
    turned = rotated(*both, angles.cos().to(dtype), angles.sin().to(dtype))
    expected = apply_rotary_pos_emb(*both, angles.cos().to(dtype), angles.sin().to(dtype))
    given = [torch.randn_like(x) for x in both]
    ours, theirs = torch.autograd.grad(turned, both, given), torch.autograd.grad(expected, both, given)
    for mine, wanted in zip((*turned, *ours), (*expected, *theirs), strict=True):
        assert torch.equal(mine, wanted)


def test_formats_that_differ_stay_apart() -> None:
    query, key, angles = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8).bfloat16(), torch.rand(1, 1, 8)
    found = rotated(query, key, angles.cos(), angles.sin())
    assert torch.equal(found[1], apply_rotary_pos_emb(query, key, angles.cos(), angles.sin())[1])
