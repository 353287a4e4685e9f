"""Heads as scalar combinations of fewer components, each followed by a linear map of its own.

Head `i` is approximated by `M_i sum_j C_ij T_j x`, where `x` are the concatenated heads of a token: `T_j x` is
component `j`, `C` are the scalars, and the weights that read the head (`q_proj`, `o_proj`) absorb the map `M_i`. So
maps cost nothing, and heads that are similar up to a map share a component. The objective is the error that
`HeadStatistics` describes, plus the rounding error of 16-bit weights, which avoids nearly singular maps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

ROUNDING = 4 * (2**-9) ** 2 / 3
"""The squared relative error of a bfloat16 number, once each for component, scalar, map and cache."""
RIDGE = 1e-7
"""Relative to a Gram matrix's mean diagonal, for directions that calibration did not cover."""
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

    @classmethod
    def joined(cls, frames: Sequence["Frame"]) -> "Frame":
        """One frame for all heads, from the frame of each group, which covers the features of its own heads."""
        own = [frame.components[..., : frame.maps.shape[0] * frame.maps.shape[1]].flatten(0, 1) for frame in frames]
        others = [
            frame.components[..., rows.shape[1] :].flatten(0, 1) for frame, rows in zip(frames, own, strict=True)
        ]
        components = torch.cat([torch.block_diag(*own), torch.cat(others)], dim=1)
        scalars = torch.block_diag(*(frame.scalars for frame in frames))
        maps = torch.cat([frame.maps for frame in frames])
        return cls(components.unflatten(0, (-1, maps.shape[1])), scalars, maps)

    def combined(self) -> torch.Tensor:
        """`sum_j C_ij T_j`: (h, d, n)."""
        return torch.einsum("ij,jdn->idn", self.scalars, self.components)

    def heads(self) -> torch.Tensor:
        """The approximated heads: (h, d, n)."""
        return self.maps @ self.combined()

    def out_of_coordinates(self, root: torch.Tensor, inverse: torch.Tensor) -> "Frame":
        """The frame for heads `x_i`, from the frame for heads `root_i x_i`."""
        components = self.components @ _block_diagonal(root, self.components.shape[-1])
        return Frame(components, self.scalars, inverse @ self.maps)

    def with_even_maps(self) -> "Frame":
        """The same heads, by maps with a mean square of one.

        Weights then have about the size they have in the source. Adam, whose steps have one size, would destroy
        smaller ones.
        """
        root, inverse = roots((self.maps.mT @ self.maps).mean(0))
        return Frame(root @ self.components, self.scalars, self.maps @ inverse)


@dataclass(frozen=True)
class Errors:
    """The error of each head as a sum over parts of `tr(metric D gram D^T)`."""

    metric: torch.Tensor
    """(h, parts, d, d)."""
    gram: torch.Tensor
    """(h, parts, n, n)."""
    scale: float = 1.0
    """Factor from these errors to those of the recorded sums."""

    @classmethod
    def of(cls, metric: torch.Tensor, gram: torch.Tensor, weight: torch.Tensor) -> "Errors":
        """From sums over windows."""
        share = weight.double().clamp_min(torch.finfo(torch.float64).tiny)[..., None, None]
        size = (_mean_diagonal(metric.double()) * _mean_diagonal(gram.double() / share)).mean()
        size = size.clamp_min(torch.finfo(torch.float64).tiny)
        metric, gram = _ridged(metric.double() / size.sqrt()), _ridged(gram.double() / share / size.sqrt())
        return cls(metric, gram, float(size))

    def part(self, heads: Sequence[int]) -> "Errors":
        """The errors of some heads, as functions of their own features (and of the number 1)."""
        (count, _, size, _), features = self.metric.shape, torch.arange(self.gram.shape[-1])
        own = torch.cat([*(features[head * size : (head + 1) * size] for head in heads), features[count * size :]])
        gram = self.gram[list(heads)][..., own, :][..., own]
        return Errors(self.metric[list(heads)], gram, self.scale)

    def in_coordinates(self, root: torch.Tensor, inverse: torch.Tensor) -> "Errors":
        """The errors of heads `root_i x_i` instead of `x_i`."""
        whole = _block_diagonal(root, self.gram.shape[-1])
        inverse = inverse.unsqueeze(1)
        return Errors(inverse.mT @ self.metric @ inverse, whole @ self.gram @ whole.mT, self.scale)

    @cached_property
    def pooled(self) -> tuple[torch.Tensor, torch.Tensor]:
        """One metric per head (h, d, d), and one Gram matrix (n, n) with a mean diagonal of 1."""
        of_gram = _mean_diagonal(self.gram)
        metric = (self.metric * (of_gram / of_gram.sum(1, keepdim=True))).sum(1)
        gram = (self.gram * _mean_diagonal(self.metric)).sum((0, 1))
        return metric, gram / _mean_diagonal(gram)

    def of_heads(self, heads: torch.Tensor) -> torch.Tensor:
        """The total error of heads (h, d, n)."""
        count, size, features = heads.shape
        difference = heads - torch.eye(count * size, features).to(heads).unflatten(0, (count, size))
        fixed = difference.detach()
        half_slope = (self.metric @ fixed.unsqueeze(1) @ self.gram).sum(1)
        # The value is <half_slope, difference>, written so that autograd does not repeat the matrix products.
        return (half_slope * (2 * difference - fixed)).sum()

    def total(self, frame: Frame) -> torch.Tensor:
        """The objective."""
        return self.of_heads(frame.heads()) + self.of_rounding(frame)

    def of_rounding(self, frame: Frame) -> torch.Tensor:
        """The approximate error due to independent relative errors of the frame's numbers."""
        metric, gram = (self.metric * _mean_diagonal(self.gram)).sum(1), self.pooled[1]
        read = ((metric @ frame.maps) * frame.maps).sum(-2)  # (h, d)
        components, combined = (((x @ gram) * x).sum(-1) for x in (frame.components, frame.combined()))
        return ROUNDING * (read * (frame.scalars**2 @ components + combined)).sum()


def _block_diagonal(blocks: torch.Tensor, features: int) -> torch.Tensor:
    """One block for each head, and ones for the remaining features."""
    rest = torch.eye(features - len(blocks) * blocks.shape[-1]).to(blocks)
    return torch.block_diag(*blocks, rest)


def _mean_diagonal(matrices: torch.Tensor) -> torch.Tensor:
    """(..., n, n) -> (..., 1, 1)."""
    return matrices.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]


def _ridged(matrices: torch.Tensor) -> torch.Tensor:
    """Add a small multiple of the identity; zero matrices become the identity."""
    size = _mean_diagonal(matrices).amax(1, keepdim=True)
    ridge = (RIDGE * size).where(size > 0, torch.ones_like(size))
    return matrices + torch.eye(matrices.shape[-1]).to(matrices) * ridge


def roots(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The symmetric square root of a positive matrix, and its inverse."""
    values, vectors = torch.linalg.eigh(matrix)
    values = values.clamp_min(values[..., -1:] * 1e-12).sqrt().unsqueeze(-2)
    return (vectors * values) @ vectors.mT, (vectors / values) @ vectors.mT


def simplex(heads: int) -> torch.Tensor:
    """Scalars (h, h - 1) with columns that are orthogonal to each other and to the ones."""
    start = torch.cat([torch.ones(heads, 1), torch.eye(heads)[:, :-1]], dim=1).double()
    return torch.linalg.qr(start).Q[:, 1:] * (heads / (heads - 1)) ** 0.5


def refine(frame: Frame, errors: Errors, family: Maps, parameters: torch.Tensor | None, steps: int) -> Frame:
    """Minimise the error with L-BFGS, starting at a frame. Maps are `family(parameters)`, or constant without them."""
    if not steps:
        return frame
    _, gram = errors.pooled
    root, inverse = roots(gram)
    whitened = (frame.components @ root).contiguous().requires_grad_()
    scalars = frame.scalars.clone(memory_format=torch.contiguous_format).requires_grad_()
    variables = [whitened, scalars]
    if parameters is not None:
        parameters = parameters.clone(memory_format=torch.contiguous_format).requires_grad_()
        variables.append(parameters)
    scale = errors.of_heads(torch.zeros_like(frame.heads()))

    def current() -> Frame:
        return Frame(whitened @ inverse, scalars, frame.maps if parameters is None else family(parameters))

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        loss = errors.total(current()) / scale
        loss.backward()
        return loss

    optimiser = torch.optim.LBFGS(
        variables, max_iter=steps, history_size=HISTORY, line_search_fn="strong_wolfe", tolerance_change=1e-10
    )
    with torch.enable_grad():
        optimiser.step(closure)
    with torch.no_grad():
        final = current()
        if not errors.total(final) <= errors.total(frame):  # also true for NaN
            return frame
        return Frame(final.components.detach(), final.scalars.detach(), final.maps.detach())
