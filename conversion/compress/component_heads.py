"""Fewer key and value heads: the rewrite of one attention layer for the `explicit` mechanism.

Method `svd` is the paper's: a truncated singular value decomposition of a projection's weights, with one column per
head. It needs no text, but the model must be trained afterwards. Method `aligned` needs `HeadStatistics` and loses
much less: see `aligned_frame`, `aligned_maps`, `fitted_output` and `fitted_steps`. Both methods leave a side (keys or
values) unchanged if it has as many components as heads. Each group of heads is compressed separately; `aligned` can
first reorder the KV heads, so that heads that share components well are in the same group.

Paper: "Explicit Multi-head Attention for Inter-head Interaction in Large Language Models", appendix F.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from crosshead.common.errors import ConversionError
from crosshead.modeling.mechanisms.base import HeadLayout

from ..architectures.families import Shapes
from ..calibration.head_statistics import KINDS, PARTS, HeadStatistics
from .aligned_frame import Errors, Frame
from .aligned_maps import aligned_keys, aligned_values, mixed_keys
from .head_groups import Counts, Group, equal_groups, query_order
from .layer_rewrites import PROJECTIONS, Tensors
from .reorder_heads import reorder

METHODS = ("aligned", "svd")
READERS = {"key": "q_proj", "value": "o_proj"}
"""Side -> projection that absorbs the maps of its heads."""
FRAME = ("components", "scalars", "maps")
"""Fields of a `Frame` that a calibration stores."""


@dataclass(frozen=True)
class ComponentHeads:
    """Component heads for the keys and values of one layer, and the method that computes them."""

    layout: HeadLayout
    counts: Counts
    method: str = "aligned"

    def rewritten_names(self) -> list[str]:
        """Return the parts that `rewrite` changes or creates; lists biases even if the model has none."""
        names = list[str]()
        for side in self._smaller_sides():
            names += [f"mixers.explicit.{side}.weight", *_names(PROJECTIONS[side])]
            if self._has_maps(side):
                names += _names(READERS[side])
        if self.method == "aligned" and names:  # o_proj may be fitted
            names += _names(READERS["value"])
        if self.counts.reorders:
            names += [name for projection in (*PROJECTIONS.values(), *READERS.values()) for name in _names(projection)]
        return names

    def _smaller_sides(self) -> list[str]:
        """Return the sides that have fewer components than heads."""
        return [side for side, count in self.counts.sides.items() if count < self.layout.key_value_heads]

    def _has_maps(self, side: str) -> bool:
        """True if a projection absorbs maps of the heads of a side; otherwise the maps are the identity."""
        can_absorb = side == "value" or self.layout.key_norm_eps is None
        return self.method == "aligned" and side in self._smaller_sides() and can_absorb

    def fitted(self, statistics: HeadStatistics) -> Tensors:
        """Return the fitted order of heads and frames, by calibration name; slow unless `statistics` contain them."""
        statistics = self.with_order(statistics)
        names = [self._order_name] if self.counts.reorders else []
        tensors: Tensors = {name: statistics.sums[name] for name in names}
        for side in self._smaller_sides():
            frame = self._frame(statistics, side)
            tensors |= {self._frame_name(side, part): getattr(frame, part) for part in FRAME}
        return tensors

    def shapes_of_fitted(self, biased: bool) -> Shapes:
        """Return calibration name -> shape of all fitted tensors: order, frames, change of `o_proj`, fit by Adam."""
        layout, counts = self.layout, self.counts
        heads, size = layout.key_value_heads, layout.head_dim
        shapes: Shapes = {self.output_name: (layout.hidden_size, layout.query_heads * size)}
        if counts.reorders:
            shapes[self._order_name] = (heads,)
        for side in self._smaller_sides():
            count = counts.sides[side]
            frame_shapes = ((count, size, heads * size + biased), (heads, count), (heads, size, size))
            shapes |= {self._frame_name(side, part): shape for part, shape in zip(FRAME, frame_shapes, strict=True)}
        rows = {"q_proj": layout.query_heads * size, "k_proj": counts.key * size, "v_proj": counts.value * size}
        part_shapes: Shapes = {f"{name}.weight": (count, layout.hidden_size) for name, count in rows.items()}
        part_shapes |= {f"{name}.bias": (count,) for name, count in rows.items() if biased}
        part_shapes["o_proj.weight"] = shapes[self.output_name]
        part_shapes |= {
            f"mixers.explicit.{side}.weight": (heads, n // counts.groups) for side, n in counts.sides.items()
        }
        return shapes | {
            self.fitted_name(part): part_shapes[part] for part in self.fitted_parts() if part in part_shapes
        }

    def fitted_parts(self) -> list[str]:
        """Return the parts that Adam fits: the parts that `rewrite` changes beyond their order, without `o_proj.bias`.

        Lists biases even if the model has none.
        """
        in_order = replace(self, counts=replace(self.counts, reorders=False))
        return sorted({*in_order.rewritten_names()} - {"o_proj.bias"})

    def fitted_name(self, part: str) -> str:
        """Return the calibration name of a tensor that Adam fits."""
        return f"fitted.{self._label}.{part}"

    @property
    def label(self) -> str:
        """Method and component counts, as in the calibration names of a router."""
        return f"{self.method}.{self._label}"

    @property
    def output_name(self) -> str:
        """Calibration name of the change of `o_proj.weight`."""
        return f"output.{self._label}"

    @property
    def _label(self) -> str:
        return self.counts.label(f"{self.counts.key}x{self.counts.value}")

    @property
    def _order_name(self) -> str:
        return f"order.{self.counts.label('')}"

    def _frame_name(self, side: str, part: str) -> str:
        return f"{side}.frame.{self.counts.label(str(self.counts.sides[side]))}.{part}"

    def rewrite(self, tensors: Tensors, statistics: HeadStatistics | None) -> Tensors:
        """Return the layer's attention tensors with component heads, given the stock tensors."""
        tensors, sides = self._compress(tensors, statistics)
        new = dict(tensors)
        for side, frame in sides.items():
            new |= _split(frame.components.flatten(0, 1), tensors, PROJECTIONS[side])
            scalars = _diagonal_blocks(frame.scalars, self.counts.groups)
            new[f"mixers.explicit.{side}.weight"] = scalars.to(tensors["q_proj.weight"])
            if self._has_maps(side):
                new |= (_absorb_key_maps if side == "key" else _absorb_value_maps)(tensors, frame.maps)
        if self.method == "aligned" and statistics is not None:
            fitted = {part: statistics.sums.get(self.fitted_name(part)) for part in self.fitted_parts()}
            new |= {part: tensor.to(tensors["q_proj.weight"]) for part, tensor in fitted.items() if tensor is not None}
        return new

    def approximate(self, tensors: Tensors, statistics: HeadStatistics | None) -> Tensors:
        """Return stock tensors equivalent to those of `rewrite` before Adam; k_proj and v_proj contain the maps."""
        tensors, sides = self._compress(tensors, statistics)
        new = dict(tensors)
        for side, frame in sides.items():
            new |= _split(frame.heads().flatten(0, 1), tensors, PROJECTIONS[side])
        return new

    def _compress(self, tensors: Tensors, statistics: HeadStatistics | None) -> tuple[Tensors, dict[str, Frame]]:
        """Return the tensors with reordered heads and fitted `o_proj`, and the compressed keys and values by side."""
        if self.counts.reorders and statistics is not None:
            statistics = self.with_order(statistics)
            tensors = reorder(tensors, query_order(self._order(statistics), self.layout), self.layout)
        if self.method == "aligned" and statistics is not None and self.output_name in statistics.sums:
            output, change = tensors["o_proj.weight"], statistics.sums[self.output_name]
            tensors = tensors | {"o_proj.weight": output + change.to(output)}
        return tensors, {side: self._compress_side(tensors, statistics, side) for side in PROJECTIONS}

    def _compress_side(self, tensors: Tensors, statistics: HeadStatistics | None, side: str) -> Frame:
        """Return the layer's keys or values by the chosen method; components are weights with a column of biases."""
        weight = _joined(tensors, PROJECTIONS[side]).unflatten(0, (self.layout.key_value_heads, -1))
        count, groups = self.counts.sides[side], self.counts.groups
        identity = torch.eye(weight.shape[1]).to(weight).expand(len(weight), -1, -1)
        if side not in self._smaller_sides():
            return Frame(weight, torch.eye(count).to(weight), identity)
        if self.method == "svd":
            parts = [_singular_vectors(heads, count // groups) for heads in weight.chunk(groups)]
            components, scalars = zip(*parts, strict=True)
            return Frame(torch.cat(components), torch.block_diag(*scalars), identity)
        if statistics is None:
            raise ConversionError(f"method={self.method!r} needs statistics: calibrate first, or use method='svd'")
        frame = self._frame(statistics, side)
        features = weight.flatten(0, 1)
        if f"{PROJECTIONS[side]}.bias" in tensors:  # the last feature is the number 1
            constant = torch.eye(features.shape[1]).to(features)[-1:]
            features = torch.cat([features, constant])
        return replace(frame, components=frame.components @ features)

    def with_order(self, statistics: HeadStatistics) -> HeadStatistics:
        """Return statistics with the order of KV heads, group by group; searched for the minimum error if missing."""
        if self._order_name in statistics.sums or not self.counts.reorders:
            return statistics
        errors = {side: self._errors(statistics, side) for side in self._smaller_sides()}

        def cost(group: Group) -> float:
            total = 0.0
            for side, side_errors in errors.items():
                part = side_errors.part(group)
                components = min(self.counts.sides[side] // self.counts.groups, len(group) - 1)
                total += self._error(side, part, self._solver(side)(part, components, refines=False))
            return total

        groups = equal_groups(self.layout.key_value_heads, self.counts.groups, cost)
        order = torch.tensor([head for group in groups for head in group], dtype=torch.float64)
        return HeadStatistics(self.layout, statistics.sums | {self._order_name: order})

    def fitted_error(self, statistics: HeadStatistics) -> float:
        """Return the total error of keys and values with the frames in the statistics; missing frames are fitted."""
        statistics, total = self.with_order(statistics), 0.0
        for side in self._smaller_sides():
            errors = self._errors(statistics, side).part(self._order(statistics))
            total += self._error(side, errors, self._frame(statistics, side))
        return total

    def _order(self, statistics: HeadStatistics) -> list[int]:
        """Return the indices of the KV heads, group by group."""
        if not self.counts.reorders:
            return [*range(self.layout.key_value_heads)]
        return statistics.sums[self._order_name].int().tolist()

    def _frame(self, statistics: HeadStatistics, side: str) -> Frame:
        """Return the frame of a side from the statistics, or fit a new one."""
        cached = [statistics.sums.get(self._frame_name(side, part)) for part in FRAME]
        if all(part is not None for part in cached):
            return Frame(*cached)  # type: ignore[arg-type]
        errors, solve, groups = self._errors(statistics, side), self._solver(side), self.counts.groups
        if groups == 1:
            return solve(errors, self.counts.sides[side])
        order, size = self._order(statistics), self.layout.key_value_heads // groups
        parts = [errors.part(order[start : start + size]) for start in range(0, len(order), size)]
        return Frame.joined([solve(part, self.counts.sides[side] // groups) for part in parts])

    def _errors(self, statistics: HeadStatistics, side: str) -> Errors:
        """Return the error function of a side; `ConversionError` if the statistics are for another head layout."""
        sums, size = [statistics.sums[f"{side}.{kind}"] for kind in KINDS], self.layout.head_dim
        shape, expected = sums[0].shape, (self.layout.key_value_heads, PARTS[side], size, size)
        if shape != expected:
            raise ConversionError(
                f"the calibration has {side} heads of the shape {list(shape)}, the layer has {list(expected)}: "
                "it was made for another model"
            )
        return Errors.of(*sums)

    def _error(self, side: str, errors: Errors, frame: Frame) -> float:
        """Return the squared error of the layer's output due to a side; key statistics lack the squared scaling."""
        return float(errors.total(frame)) * errors.scale / (self.layout.head_dim if side == "key" else 1)

    def _solver(self, side: str) -> Callable[..., Frame]:
        """Return the function that fits a frame to the heads of a side."""
        if side == "value":
            return aligned_values
        return aligned_keys if self.layout.key_norm_eps is None else mixed_keys


def _diagonal_blocks(scalars: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the blocks (h, h' / groups) of block-diagonal scalars (h, h'), as the model stores them."""
    by_group = scalars.unflatten(1, (groups, -1)).unflatten(0, (groups, -1))
    return by_group.diagonal(dim1=0, dim2=2).permute(2, 0, 1).flatten(0, 1)


def _singular_vectors(heads: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return components (h', d, hidden) and scalars (h, h') of heads (h, d, hidden), by a truncated SVD."""
    left, values, right = torch.linalg.svd(heads.flatten(1).T, full_matrices=False)
    return left[:, :count].T.unflatten(1, heads.shape[1:]), (values.unsqueeze(-1) * right)[:count].T


def _absorb_key_maps(tensors: Tensors, maps: torch.Tensor) -> Tensors:
    """Return the query projection that absorbs the maps of the key heads that each query head attends to."""
    weight = _joined(tensors, READERS["key"]).unflatten(0, (len(maps), -1, maps.shape[-1]))
    return _split((maps.mT.unsqueeze(1) @ weight).flatten(0, 2), tensors, READERS["key"])


def _absorb_value_maps(tensors: Tensors, maps: torch.Tensor) -> Tensors:
    """Return the output projection that absorbs the maps of the value heads; its bias does not change."""
    weight = tensors["o_proj.weight"].to(maps).unflatten(1, (len(maps), -1, maps.shape[-1]))
    absorbed = torch.einsum("nhga,hab->nhgb", weight, maps).flatten(1)
    return {"o_proj.weight": absorbed.to(tensors["o_proj.weight"])}


def _names(projection: str) -> list[str]:
    return [f"{projection}.{part}" for part in ("weight", "bias")]


def _joined(tensors: Tensors, projection: str) -> torch.Tensor:
    """Return a projection (rows, hidden) in float64, with its bias (if any) as a last column."""
    weight, bias = (tensors.get(name) for name in _names(projection))
    columns = [weight] if bias is None else [weight, bias.unsqueeze(-1)]
    return torch.cat(columns, dim=1).double()  # type: ignore[arg-type]


def _split(joined: torch.Tensor, tensors: Tensors, projection: str) -> Tensors:
    """Return weight and bias in the dtype of the projection's weight: the inverse of `_joined`."""
    weight, bias = _names(projection)
    joined = joined.to(tensors[weight].dtype)
    if bias not in tensors:
        return {weight: joined.contiguous()}
    return {weight: joined[:, :-1].contiguous(), bias: joined[:, -1].contiguous()}
