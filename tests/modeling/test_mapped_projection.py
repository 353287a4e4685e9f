"""A projection with a map behind each head, as one product: the same outputs and gradients, and little kept."""

import pytest
import torch
from torch import nn

from crosshead.modeling.mechanisms.knocking import LinearKnock
from crosshead.modeling.mapped_projection import mapped_projection

SIZE, HEADS, WIDTH = 4, 3, 10


def modules(bias: bool) -> tuple[nn.Linear, nn.Module]:
    torch.manual_seed(0)
    knock = LinearKnock(SIZE, "random").double()
    nn.init.normal_(knock.weight)
    return nn.Linear(WIDTH, HEADS * SIZE, bias=bias).double(), knock


@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("shape", ((2, 5), (1, 1), (7,)))
def test_equals_both_in_turn(bias: bool, shape: tuple[int, ...]) -> None:
    projection, knock = modules(bias)
    found = []
    for fused in (True, False):
        hidden = torch.linspace(-2, 2, WIDTH, dtype=torch.float64).repeat(*shape, 1).cos().requires_grad_()
        if fused:
            mapped = mapped_projection(projection, knock, SIZE, hidden)
        else:
            mapped = knock(projection(hidden).unflatten(-1, (HEADS, SIZE))).flatten(-2)
        leaves = [hidden, *projection.parameters(), *knock.parameters()]
        found.append((mapped, *torch.autograd.grad((mapped.sin() * mapped).sum(), leaves)))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_gradients_have_gradients() -> None:
    projection, knock = modules(bias=True)

    def run(hidden: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return mapped_projection(projection, knock, SIZE, hidden)

    leaves = (torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True), projection.weight, projection.bias)
    assert torch.autograd.gradcheck(run, (*leaves, *knock.parameters()))
    assert torch.autograd.gradgradcheck(run, (*leaves, *knock.parameters()), fast_mode=True)


def test_the_product_is_not_kept() -> None:
    projection, knock = modules(bias=True)
    hidden = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        mapped_projection(projection, knock, SIZE, hidden)
    own = {x.data_ptr() for x in (hidden, *projection.parameters(), *knock.parameters())}
    assert kept and all(x.data_ptr() in own or x.numel() == SIZE * SIZE for x in kept)
