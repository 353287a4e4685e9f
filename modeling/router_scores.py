"""What the routers of `mixture` score heads by, and how a hard choice passes gradients to a score."""

import torch
from torch import nn
from torch.nn import functional
from transformers import initialization as init

from .mixer import LinearLeaf
from .numerics import widened


class RouterMap(LinearLeaf):
    """Logits from a token's hidden state."""

    def initialise(self, std: float) -> None:
        """Start at random."""
        init.normal_(self.weight, mean=0.0, std=std)


def scores(router: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Softmax over a router's logits, in the widened dtype."""
    return functional.softmax(router(hidden), dim=-1, dtype=widened(hidden.dtype))


def straight_through(hard: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """`hard`, exactly, whose gradient where it is 1 is the gradient of `score`."""
    return hard + hard * (score - score.detach())


def query_norm_probabilities(query: torch.Tensor) -> torch.Tensor:
    """Softmax over heads of `||q_i|| / std(||q||)`: (B, H, T, d) -> (B, T, H)."""
    norms = torch.linalg.vector_norm(query.to(widened(query.dtype)), dim=-1).transpose(1, 2)
    variance = norms.var(dim=-1, keepdim=True)
    # Equal norms have no spread to divide by, and the root's gradient at zero is infinite.
    spread = variance.clamp_min(1e-12).sqrt()
    return functional.softmax(norms / spread, dim=-1)
