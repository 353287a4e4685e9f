"""Projections of chosen tokens alone: into the heads that they chose, and out of these.

Each head has the tokens that chose it: their rows are taken, meet the part of the weight that is the head's, and go
where they belong. Heads that every token chose are one product together. The backward pass takes the rows again, so
that no copy of them is kept.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .quick_products import is_quicker, product
from .readable_weights import readable
from .traced import traced

LEAST_TOKENS = 1024
"""From here on the products that are saved are worth more than the rows that are moved."""
LEAST_FEATURES = 1024
"""Of the hidden states; a head's part of a narrower product is too small to be worth its rows."""
GREATEST_SHARE, GREATEST_EVALUATED_SHARE = 0.6, 0.75
"""Of the tokens that are chosen; above, the rows that are moved cost what the products save. Without gradients these
take less, where they are quick."""
DTYPES = (torch.float32, torch.float64)
"""The sum over heads would be rounded head by head in half precision."""


def pays_to_choose(projection: nn.Module, hidden: torch.Tensor, share: float) -> bool:
    """Whether a projection from or to these hidden states is sooner done for the tokens that heads chose alone."""
    if hidden.device.type != "cpu" or hidden.dtype not in DTYPES or torch.is_autocast_enabled("cpu") or traced():
        return False
    quick = is_quicker(hidden) and not torch.is_grad_enabled()
    if share > (GREATEST_EVALUATED_SHARE if quick else GREATEST_SHARE) or type(projection) is not nn.Linear:
        return False
    if hidden.shape[:-1].numel() < LEAST_TOKENS or hidden.shape[-1] < LEAST_FEATURES:
        return False
    return readable(projection)


def _dense_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`product`, where it is quicker, of copies where the matrices have gaps between their rows."""
    return product(x.contiguous(), weight.contiguous()) if is_quicker(x) else functional.linear(x, weight)


@dataclass(frozen=True)
class ChosenTokens:
    """Which tokens (N) each head has, by `mask` (N, H); the first `shared` heads have all."""

    mask: torch.Tensor
    shared: int
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = field(
        default_factory=lambda: functional.linear if torch.is_grad_enabled() else _dense_product
    )
    """Training has no memory for the kernels of quick products."""

    @cached_property
    def rows(self) -> dict[int, torch.Tensor]:
        """The tokens of each head but the shared ones."""
        heads = range(self.shared, self.mask.shape[1])
        return {head: self.mask[:, head].nonzero().flatten() for head in heads}

    def into(self, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Heads (N, H, d) of tokens (N, D) by a weight (H, d, D); zeros where a token did not choose."""
        (count, size, _), shared = weight.shape, self.shared
        heads = tokens.new_zeros(len(tokens), count, size)
        if shared:
            heads[:, :shared] = self.multiply(tokens, weight[:shared].flatten(0, 1)).unflatten(1, (shared, size))
        for head, rows in self.rows.items():
            found = self.multiply(tokens.index_select(0, rows), weight[head])
            heads.view(-1, size).index_copy_(0, rows * count + head, found)
        return heads

    def out_of(self, heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Tokens (N, D) from heads (N, H, d), the other way."""
        tokens = self.multiply(heads[:, : self.shared].flatten(1), weight[: self.shared].flatten(0, 1).t())
        for head, rows in self.rows.items():
            found = self.multiply(heads[:, head].index_select(0, rows), weight[head].t())
            tokens.index_add_(0, rows, found)
        return tokens

    def products(self, heads: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """What either gives to its weight: (H, d, D)."""
        (_, count, size), shared = heads.shape, self.shared
        found = tokens.new_empty(count, size, tokens.shape[1])
        if shared:
            torch.mm(heads[:, :shared].flatten(1).t(), tokens, out=found[:shared].flatten(0, 1))
        for head, rows in self.rows.items():
            torch.mm(heads[:, head].index_select(0, rows).t(), tokens.index_select(0, rows), out=found[head])
        return found

    def project_in(self, projection: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        """Heads (B, T, H d) of hidden states (B, T, D)."""
        weight = projection.weight.unflatten(0, (self.mask.shape[1], -1))
        heads: torch.Tensor = ByChosenTokens.apply(hidden.flatten(0, -2), weight, self, True)
        if projection.bias is not None:
            heads = heads + projection.bias.unflatten(0, (self.mask.shape[1], -1)) * self.mask.unsqueeze(-1)
        return heads.flatten(1).unflatten(0, hidden.shape[:-1])

    def project_out(self, projection: nn.Linear, heads: torch.Tensor) -> torch.Tensor:
        """Hidden states (B, T, D) from heads (B, T, H, d), which count for nothing where they were not chosen."""
        weight = projection.weight.unflatten(1, (self.mask.shape[1], -1)).permute(1, 2, 0)
        tokens: torch.Tensor = ByChosenTokens.apply(heads.flatten(0, -3), weight, self, False)
        if projection.bias is not None:
            tokens = tokens + projection.bias
        return tokens.unflatten(0, heads.shape[:-2])


class ByChosenTokens(torch.autograd.Function):
    """`ChosenTokens.into` heads, or `ChosenTokens.out_of` them, with gradients; each is the other's transpose."""

    @staticmethod
    def forward(
        ctx: Any, given: torch.Tensor, weight: torch.Tensor, chosen: ChosenTokens, inwards: bool
    ) -> torch.Tensor:
        """Heads (N, H, d) of tokens (N, D), or tokens of heads."""
        ctx.save_for_backward(given, weight)
        ctx.chosen, ctx.inwards = chosen, inwards
        return chosen.into(given, weight) if inwards else chosen.out_of(given, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """To what was given and to the weight."""
        (given, weight), chosen, needed = ctx.saved_tensors, ctx.chosen, ctx.needs_input_grad
        back = chosen.out_of if ctx.inwards else chosen.into
        heads, tokens = (gradient, given) if ctx.inwards else (given, gradient)
        to_given = back(gradient, weight) if needed[0] else None
        return to_given, chosen.products(heads, tokens) if needed[1] else None, None, None
