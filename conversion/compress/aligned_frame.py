"""Heads as scalar combinations of fewer components, each head seen through a linear map of its own.

Head `i` is approximated by `M_i sum_j C_ij T_j x`, where `x` are all heads of a token beside each other: `T_j x` is
component `j`, `C` are the scalars, and `M_i` disappears into the weights that read the head (`q_proj`, `o_proj`).
So the maps cost nothing, and heads that are alike up to a map share a component. What is minimised is the error that
`HeadStatistics` describes, and with it the rounding of 16-bit weights, so that no map is close to singular.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

ROUNDING = 4 * (2**-9) ** 2 / 3
"""The squared relative error of a stored bfloat16 number, once each for component, scalar, map and cache."""
RIDGE = 1e-7
"""Of a Gram matrix's mean diagonal, for directions that calibration has not seen."""
HISTORY = 20

Maps = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Frame:
    """Components, scalars and maps."""

    components: torch.Tensor
    """`T`: (h', d, n)."""
    scalars: torch.Tensor
    """`C`: (h, h')."""
    maps: torch.Tensor
    """`M`: (h, d, d)."""

    def combined(self) -> torch.Tensor:
        """`sum_j C_ij T_j`: (h, d, n)."""
        return torch.einsum("ij,jdn->idn", self.scalars, self.components)

    def heads(self) -> torch.Tensor:
        """What each head becomes: (h, d, n)."""
        return self.maps @ self.combined()

    def out_of_coordinates(self, root: torch.Tensor, inverse: torch.Tensor) -> "Frame":
        """The frame of heads `x_i`, from that of heads `root_i x_i`."""
        return Frame(
            self.components @ _block_diagonal(root, self.components.shape[-1]), self.scalars, inverse @ self.maps
        )


@dataclass(frozen=True)
class Errors:
    """Sums over parts of `tr(metric D gram D^T)`, for each head."""

    metric: torch.Tensor
    """(h, parts, d, d)."""
    gram: torch.Tensor
    """(h, parts, n, n)."""

    @classmethod
    def of(cls, metric: torch.Tensor, gram: torch.Tensor, weight: torch.Tensor) -> "Errors":
        """From sums over windows."""
        share = weight.double().clamp_min(torch.finfo(torch.float64).tiny)[..., None, None]
        size = (_mean_diagonal(metric.double()) * _mean_diagonal(gram.double() / share)).mean()
        size = size.clamp_min(torch.finfo(torch.float64).tiny)
        metric, gram = _ridged(metric.double() / size.sqrt()), _ridged(gram.double() / share / size.sqrt())
        return cls(metric, gram)

    def in_coordinates(self, root: torch.Tensor, inverse: torch.Tensor) -> "Errors":
        """The errors of heads `root_i x_i` instead of `x_i`."""
        whole = _block_diagonal(root, self.gram.shape[-1])
        inverse = inverse.unsqueeze(1)
        return Errors(inverse.mT @ self.metric @ inverse, whole @ self.gram @ whole.mT)

    @cached_property
    def pooled(self) -> tuple[torch.Tensor, torch.Tensor]:
        """One metric per head (h, d, d), and one Gram matrix (n, n) with a mean diagonal of 1."""
        of_gram = _mean_diagonal(self.gram)
        metric = (self.metric * (of_gram / of_gram.sum(1, keepdim=True))).sum(1)
        gram = (self.gram * _mean_diagonal(self.metric)).sum((0, 1))
        return metric, gram / _mean_diagonal(gram)

    def of_heads(self, heads: torch.Tensor) -> torch.Tensor:
        """The error of heads (h, d, n), a number."""
        count, size, features = heads.shape
        difference = heads - torch.eye(count * size, features).to(heads).unflatten(0, (count, size))
        fixed = difference.detach()
        half_slope = (self.metric @ fixed.unsqueeze(1) @ self.gram).sum(1)
        # The value is <half_slope, difference>; written so that autograd need not multiply all matrices again.
        return (half_slope * (2 * difference - fixed)).sum()

    def total(self, frame: Frame) -> torch.Tensor:
        """What is minimised."""
        return self.of_heads(frame.heads()) + self.of_rounding(frame)

    def of_rounding(self, frame: Frame) -> torch.Tensor:
        """About what independent relative errors in the numbers of a frame cost, a number."""
        metric, gram = (self.metric * _mean_diagonal(self.gram)).sum(1), self.pooled[1]
        read = ((metric @ frame.maps) * frame.maps).sum(-2)  # (h, d)
        components, whole = (((x @ gram) * x).sum(-1) for x in (frame.components, frame.combined()))
        return ROUNDING * (read * (frame.scalars**2 @ components + whole)).sum()


def _block_diagonal(blocks: torch.Tensor, features: int) -> torch.Tensor:
    """One block for each head, and ones for features that are no head's."""
    rest = torch.eye(features - len(blocks) * blocks.shape[-1]).to(blocks)
    return torch.block_diag(*blocks, rest)


def _mean_diagonal(matrices: torch.Tensor) -> torch.Tensor:
    """Kept with two dimensions of size 1."""
    return matrices.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]


def _ridged(matrices: torch.Tensor) -> torch.Tensor:
    """Never singular; the identity where nothing was seen at all."""
    size = _mean_diagonal(matrices).amax(1, keepdim=True)
    return matrices + torch.eye(matrices.shape[-1]).to(matrices) * (RIDGE * size).where(
        size > 0, torch.ones_like(size)
    )


def roots(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The symmetric square root of a positive matrix, and its inverse."""
    values, vectors = torch.linalg.eigh(matrix)
    values = values.clamp_min(values[..., -1:] * 1e-12).sqrt().unsqueeze(-2)
    return (vectors * values) @ vectors.mT, (vectors / values) @ vectors.mT


def simplex(heads: int) -> torch.Tensor:
    """Scalars (h, h - 1) whose columns are orthogonal to each other and to the ones."""
    start = torch.cat([torch.ones(heads, 1), torch.eye(heads)[:, :-1]], dim=1).double()
    return torch.linalg.qr(start).Q[:, 1:] * (heads / (heads - 1)) ** 0.5


def refine(frame: Frame, errors: Errors, family: Maps, parameters: torch.Tensor | None, steps: int) -> Frame:
    """Descend from a frame to a better one whose maps are `family(parameters)`, or stay as they are."""
    _, gram = errors.pooled
    root, inverse = roots(gram)
    white = (frame.components @ root).contiguous().requires_grad_()
    scalars = frame.scalars.clone(memory_format=torch.contiguous_format).requires_grad_()
    free = [white, scalars]
    if parameters is not None:
        parameters = parameters.clone(memory_format=torch.contiguous_format).requires_grad_()
        free.append(parameters)
    scale = errors.of_heads(torch.zeros_like(frame.heads()))

    def current() -> Frame:
        return Frame(white @ inverse, scalars, frame.maps if parameters is None else family(parameters))

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        now = current()
        loss = errors.total(now) / scale
        loss.backward()
        return loss

    optimiser = torch.optim.LBFGS(
        free, max_iter=steps, history_size=HISTORY, line_search_fn="strong_wolfe", tolerance_change=1e-10
    )
    with torch.enable_grad():
        optimiser.step(closure)
    with torch.no_grad():
        final = current()
        if not errors.total(final) <= errors.total(frame):  # also where the descent has left the numbers
            return frame
        return Frame(final.components.detach(), final.scalars.detach(), final.maps.detach())
