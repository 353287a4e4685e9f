"""Factorisation of the key or value heads of a layer into fewer components, scalars, and a linear map per head.

Head `i` is approximated by `M_i sum_j C_ij T_j x`, where `x` (n) are the concatenated heads of a token: `T_j x` is
component `j`, `C` are the scalars, and the projection that reads the head (`q_proj`, `o_proj`) absorbs the map `M_i`.
So maps cost nothing at inference, and heads that are similar up to a linear map share a component. The objective is
the error that `HeadStatistics` describes, plus the rounding error of 16-bit weights, which penalises nearly singular
maps. Shapes: `h` heads, `h'` components, `d` features per head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

ROUNDING = 4 * (2**-9) ** 2 / 3
"""Squared relative rounding error of bfloat16, for four roundings: component, scalar, map and cache."""
RIDGE = 1e-7
"""Ridge relative to the mean diagonal of a metric or Gram matrix, for directions that calibration did not cover."""
HISTORY = 20
"""History size of L-BFGS."""

Maps = Callable[[torch.Tensor], torch.Tensor]
"""Function from parameters to maps (h, d, d)."""


@dataclass(frozen=True)
class Frame:
    """Factors of the approximated heads: components, scalars and maps."""

    components: torch.Tensor
    """`T`: (h', d, n)."""
    scalars: torch.Tensor
    """`C`: (h, h')."""
    maps: torch.Tensor
    """`M`: (h, d, d)."""

    @classmethod
    def joined(cls, frames: Sequence["Frame"]) -> "Frame":
        """Return one frame for all heads from the frames of groups, each on the features of the group's own heads."""
        size = frames[0].maps.shape[-1]
        split = [frame.components.flatten(0, 1).tensor_split([len(frame.maps) * size], dim=1) for frame in frames]
        head_features, other_features = zip(*split, strict=True)
        components = torch.cat([torch.block_diag(*head_features), torch.cat(other_features)], dim=1)
        scalars = torch.block_diag(*(frame.scalars for frame in frames))
        maps = torch.cat([frame.maps for frame in frames])
        return cls(components.unflatten(0, (-1, size)), scalars, maps)

    def combined(self) -> torch.Tensor:
        """Return the heads before their maps, `sum_j C_ij T_j`: (h, d, n)."""
        return torch.einsum("ij,jdn->idn", self.scalars, self.components)

    def heads(self) -> torch.Tensor:
        """Return the approximated heads, `M_i sum_j C_ij T_j`: (h, d, n)."""
        return self.maps @ self.combined()

    def from_transformed(self, root: torch.Tensor, inverse: torch.Tensor) -> "Frame":
        """Return the frame for heads `x_i`, if this is a frame for the transformed heads `root_i x_i`."""
        components = self.components @ _block_diagonal(root, self.components.shape[-1])
        return Frame(components, self.scalars, inverse @ self.maps)

    def with_normalised_maps(self) -> "Frame":
        """Return a frame with the same heads, whose maps have the identity as the mean of `M_i^T M_i`.

        The weights then have about the same scale as in the source. The size of Adam's steps does not depend on a
        weight's scale, so that they would destroy smaller weights.
        """
        root, inverse = roots((self.maps.mT @ self.maps).mean(0))
        return Frame(root @ self.components, self.scalars, self.maps @ inverse)


@dataclass(frozen=True)
class Errors:
    """Quadratic error of each head: the sum over parts of `tr(metric D gram D^T)`, for an error matrix D (d, n)."""

    metric: torch.Tensor
    """Sensitivity of the layer's output to errors in a head: (h, parts, d, d)."""
    gram: torch.Tensor
    """Gram matrices of the concatenated heads: (h, parts, n, n)."""
    scale: float = 1.0
    """Ratio of the error in the recorded sums to this normalised error."""

    @classmethod
    def of(cls, metric: torch.Tensor, gram: torch.Tensor, weight: torch.Tensor) -> "Errors":
        """Return the normalised errors of the sums that `HeadStatistics` records."""
        share = weight.double().clamp_min(torch.finfo(torch.float64).tiny)[..., None, None]
        size = (_mean_diagonal(metric.double()) * _mean_diagonal(gram.double() / share)).mean()
        size = size.clamp_min(torch.finfo(torch.float64).tiny)
        metric, gram = _ridged(metric.double() / size.sqrt()), _ridged(gram.double() / share / size.sqrt())
        return cls(metric, gram, float(size))

    def part(self, heads: Sequence[int]) -> "Errors":
        """Return the errors of some heads as functions of only their own features (and of the constant of a bias)."""
        (count, _, size, _), features = self.metric.shape, torch.arange(self.gram.shape[-1])
        columns = torch.cat([*(features[head * size : (head + 1) * size] for head in heads), features[count * size :]])
        gram = self.gram[list(heads)][..., columns, :][..., columns]
        return Errors(self.metric[list(heads)], gram, self.scale)

    def transformed(self, root: torch.Tensor, inverse: torch.Tensor) -> "Errors":
        """Return the errors as functions of transformed heads `root_i x_i` instead of `x_i`."""
        full_root = _block_diagonal(root, self.gram.shape[-1])
        inverse = inverse.unsqueeze(1)
        return Errors(inverse.mT @ self.metric @ inverse, full_root @ self.gram @ full_root.mT, self.scale)

    @cached_property
    def pooled(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Metric per head (h, d, d), averaged over parts; one Gram matrix (n, n) with a mean diagonal of 1."""
        gram_scale = _mean_diagonal(self.gram)
        metric = (self.metric * (gram_scale / gram_scale.sum(1, keepdim=True))).sum(1)
        gram = (self.gram * _mean_diagonal(self.metric)).sum((0, 1))
        return metric, gram / _mean_diagonal(gram)

    def of_heads(self, heads: torch.Tensor) -> torch.Tensor:
        """Return the total error of approximated heads (h, d, n)."""
        count, size, features = heads.shape
        difference = heads - torch.eye(count * size, features).to(heads).unflatten(0, (count, size))
        fixed = difference.detach()
        half_slope = (self.metric @ fixed.unsqueeze(1) @ self.gram).sum(1)
        # Value <half_slope, difference>, gradient 2 half_slope: autograd need not differentiate the matrix products.
        return (half_slope * (2 * difference - fixed)).sum()

    def total(self, frame: Frame) -> torch.Tensor:
        """Return the objective: the error of a frame's heads plus its rounding error."""
        return self.of_heads(frame.heads()) + self.of_rounding(frame)

    def of_rounding(self, frame: Frame) -> torch.Tensor:
        """Return the approximate expected error from independent relative rounding errors in a frame's factors."""
        metric, gram = (self.metric * _mean_diagonal(self.gram)).sum(1), self.pooled[1]
        read = ((metric @ frame.maps) * frame.maps).sum(-2)  # (h, d)
        components, combined = (((x @ gram) * x).sum(-1) for x in (frame.components, frame.combined()))
        return ROUNDING * (read * (frame.scalars**2 @ components + combined)).sum()


def _block_diagonal(blocks: torch.Tensor, features: int) -> torch.Tensor:
    """Return the block-diagonal matrix (features, features) of blocks (h, d, d), and ones for other features."""
    rest = torch.eye(features - len(blocks) * blocks.shape[-1]).to(blocks)
    return torch.block_diag(*blocks, rest)


def _mean_diagonal(matrices: torch.Tensor) -> torch.Tensor:
    """Return the mean of the diagonal: (..., n, n) -> (..., 1, 1)."""
    return matrices.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]


def _ridged(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices (h, parts, n, n) plus a small multiple of the identity; zero matrices become the identity."""
    size = _mean_diagonal(matrices).amax(1, keepdim=True)
    ridge = (RIDGE * size).where(size > 0, torch.ones_like(size))
    return matrices + torch.eye(matrices.shape[-1]).to(matrices) * ridge


def roots(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the symmetric square root of a positive semidefinite matrix, and the inverse of that root."""
    values, vectors = torch.linalg.eigh(matrix)
    values = values.clamp_min(values[..., -1:] * 1e-12).sqrt().unsqueeze(-2)
    return (vectors * values) @ vectors.mT, (vectors / values) @ vectors.mT


def simplex(heads: int) -> torch.Tensor:
    """Return scalars (h, h - 1) whose columns are orthogonal to each other and to the vector of ones."""
    start = torch.cat([torch.ones(heads, 1), torch.eye(heads)[:, :-1]], dim=1).double()
    return torch.linalg.qr(start).Q[:, 1:] * (heads / (heads - 1)) ** 0.5


def refine(frame: Frame, errors: Errors, family: Maps, parameters: torch.Tensor | None, steps: int) -> Frame:
    """Return the frame after minimising the objective by L-BFGS; maps are `family(parameters)`, else constant."""
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
