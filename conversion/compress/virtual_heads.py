"""Fewer key and value heads: the rewrite of one attention layer for the `explicit` mechanism.

Method `svd` is the paper's: the singular value decomposition of a projection's weights, one column for each head. It
needs no text, but the model must be trained afterwards. Method `aligned` needs `HeadStatistics` and loses much less:
see `aligned_frame`, `aligned_maps`, `fitted_output` and `fitted_steps`. Both leave a side unchanged that keeps as many
components as heads. Groups of heads are compressed each on its own; `aligned` can first reorder the KV heads, so that
those that share components well are in one group.

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
from .layer_rewrites import Tensors
from .reorder_heads import reorder

METHODS = ("aligned", "svd")
PROJECTIONS = {"key": "k_proj", "value": "v_proj"}
READERS = {"key": "q_proj", "value": "o_proj"}
"""The projections that absorb the maps of key and value heads."""
FRAME = ("components", "scalars", "maps")


@dataclass(frozen=True)
class _Compressed:
    """Keys or values as combinations of component heads."""

    components: torch.Tensor
    """(h', d, hidden), and the biases as a last column if there are any."""
    scalars: torch.Tensor
    """(h, h'), block-diagonal if there are groups."""
    maps: torch.Tensor | None
    """(h, d, d); None if the reading projection does not change."""

    def blocks(self, groups: int) -> torch.Tensor:
        """The scalars of each group, as the model stores them: (h, h' / groups)."""
        by_group = self.scalars.unflatten(1, (groups, -1)).unflatten(0, (groups, -1))
        return by_group.diagonal(dim1=0, dim2=2).permute(2, 0, 1).flatten(0, 1)

    def heads(self) -> torch.Tensor:
        """The approximated heads: (h, d, hidden)."""
        heads = torch.einsum("ij,jdn->idn", self.scalars, self.components)
        return heads if self.maps is None else self.maps @ heads


@dataclass(frozen=True)
class ComponentHeads:
    """Component heads for the keys and values of one layer, and the method that finds them."""

    layout: HeadLayout
    counts: Counts
    method: str = "aligned"

    def rewritten_names(self) -> list[str]:
        """The tensors, within the layer's attention, that `rewrite` changes or creates; includes possible biases."""
        names, is_aligned = [], self.method == "aligned"
        for side in self._smaller_sides():
            names += [f"mixers.explicit.{side}.weight", *_names(PROJECTIONS[side])]
            if is_aligned and side == "key" and self.layout.key_norm_eps is None:
                names += _names(READERS[side])
        if is_aligned and names:  # it absorbs the maps of values, and may be fitted
            names += _names(READERS["value"])
        if self.counts.reorders:
            names += [name for projection in (*PROJECTIONS.values(), *READERS.values()) for name in _names(projection)]
        return names

    def _smaller_sides(self) -> list[str]:
        """The sides that have fewer components than heads."""
        return [side for side, count in self.counts.sides.items() if count < self.layout.key_value_heads]

    def solved(self, statistics: HeadStatistics) -> Tensors:
        """The order and the frames, by their names in the statistics; they take time to compute."""
        statistics = self.with_order(statistics)
        names = [self._order_name] if self.counts.reorders else []
        tensors: Tensors = {name: statistics.sums[name] for name in names}
        for side in self._smaller_sides():
            frame = self._frame(statistics, side)
            tensors |= {self._frame_name(side, part): getattr(frame, part) for part in FRAME}
        return tensors

    def shapes_of_solved(self, biased: bool) -> Shapes:
        """The shapes of these tensors, of the change of the output projection, and of the tensors fitted by steps."""
        layout, counts = self.layout, self.counts
        heads, size = layout.key_value_heads, layout.head_dim
        shapes: Shapes = {self.output_name: (layout.hidden_size, layout.query_heads * size)}
        if counts.reorders:
            shapes[self._order_name] = (heads,)
        for side in self._smaller_sides():
            count = counts.sides[side]
            of_frame = ((count, size, heads * size + biased), (heads, count), (heads, size, size))
            shapes |= {self._frame_name(side, part): shape for part, shape in zip(FRAME, of_frame, strict=True)}
        rows = {"q_proj": layout.query_heads * size, "k_proj": counts.key * size, "v_proj": counts.value * size}
        of_part: Shapes = {f"{name}.weight": (count, layout.hidden_size) for name, count in rows.items()}
        of_part |= {f"{name}.bias": (count,) for name, count in rows.items() if biased}
        of_part["o_proj.weight"] = shapes[self.output_name]
        of_part |= {f"mixers.explicit.{side}.weight": (heads, n // counts.groups) for side, n in counts.sides.items()}
        return shapes | {self.fitted_name(part): of_part[part] for part in self.fitted_parts() if part in of_part}

    def fitted_parts(self) -> list[str]:
        """The tensors that are fitted by steps: none of a side that keeps all its heads; includes possible biases."""
        in_order = replace(self, counts=replace(self.counts, reorders=False))
        return sorted({*in_order.rewritten_names()} - {"o_proj.bias"})

    def fitted_name(self, part: str) -> str:
        """The name, in the statistics, of a tensor that is fitted by steps."""
        return f"fitted.{self._label}.{part}"

    @property
    def output_name(self) -> str:
        """The name, in the statistics, of the change of the output projection."""
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
        """The layer's attention tensors with component heads, from those for all heads."""
        tensors, sides = self._compress(tensors, statistics)
        new = dict(tensors)
        for side, compressed in sides.items():
            new |= _split(compressed.components.flatten(0, 1), tensors, PROJECTIONS[side])
            new[f"mixers.explicit.{side}.weight"] = compressed.blocks(self.counts.groups).to(tensors["q_proj.weight"])
            if compressed.maps is not None:
                absorb = _absorb_key_maps if side == "key" else _absorb_value_maps
                new |= absorb(tensors, compressed.maps)
        if self.method == "aligned" and statistics is not None:
            fitted = {part: statistics.sums.get(self.fitted_name(part)) for part in self.fitted_parts()}
            new |= {part: tensor.to(tensors["q_proj.weight"]) for part, tensor in fitted.items() if tensor is not None}
        return new

    def approximate(self, tensors: Tensors, statistics: HeadStatistics | None) -> Tensors:
        """Stock attention tensors equivalent to those of `rewrite` before the steps; no projection absorbs a map."""
        tensors, sides = self._compress(tensors, statistics)
        new = dict(tensors)
        for side, compressed in sides.items():
            new |= _split(compressed.heads().flatten(0, 1), tensors, PROJECTIONS[side])
        return new

    def _compress(self, tensors: Tensors, statistics: HeadStatistics | None) -> tuple[Tensors, dict[str, _Compressed]]:
        """The tensors with heads in order and the fitted output projection; and the compressed keys and values."""
        if self.counts.reorders and statistics is not None:
            statistics = self.with_order(statistics)
            tensors = reorder(tensors, query_order(self._order(statistics), self.layout), self.layout)
        if self.method == "aligned" and statistics is not None and self.output_name in statistics.sums:
            output, change = tensors["o_proj.weight"], statistics.sums[self.output_name]
            tensors = tensors | {"o_proj.weight": output + change.to(output)}
        return tensors, {side: self._compress_side(tensors, statistics, side) for side in PROJECTIONS}

    def _compress_side(self, tensors: Tensors, statistics: HeadStatistics | None, side: str) -> _Compressed:
        weight = _joined(tensors, PROJECTIONS[side]).unflatten(0, (self.layout.key_value_heads, -1))
        count, groups = self.counts.sides[side], self.counts.groups
        if side not in self._smaller_sides():
            return _Compressed(weight, torch.eye(count).to(weight), None)
        if self.method == "svd":
            parts = [_singular_vectors(heads, count // groups) for heads in weight.chunk(groups)]
            components, scalars = zip(*parts, strict=True)
            return _Compressed(torch.cat(components), torch.block_diag(*scalars), None)
        if statistics is None:
            raise ConversionError(f"method={self.method!r} needs statistics: calibrate first, or use method='svd'")
        frame = self._frame(statistics, side)
        features = weight.flatten(0, 1)
        if f"{PROJECTIONS[side]}.bias" in tensors:  # the last feature is the number 1
            one = torch.eye(features.shape[1]).to(features)[-1:]
            features = torch.cat([features, one])
        absorbs = side == "value" or self.layout.key_norm_eps is None
        return _Compressed(frame.components @ features, frame.scalars, frame.maps if absorbs else None)

    def with_order(self, statistics: HeadStatistics) -> HeadStatistics:
        """The statistics with the KV heads group after group: a search for the minimum error, unless they have it."""
        if self._order_name in statistics.sums or not self.counts.reorders:
            return statistics
        errors = {side: self._errors(statistics, side) for side in self._smaller_sides()}

        def cost(group: Group) -> float:
            total = 0.0
            for side, of_side in errors.items():
                part = of_side.part(group)
                components = min(self.counts.sides[side] // self.counts.groups, len(group) - 1)
                total += self._error(side, part, self._solver(side)(part, components, refines=False))
            return total

        groups = equal_groups(self.layout.key_value_heads, self.counts.groups, cost)
        order = torch.tensor([head for group in groups for head in group], dtype=torch.float64)
        return HeadStatistics(self.layout, statistics.sums | {self._order_name: order})

    def fitted_error(self, statistics: HeadStatistics) -> float:
        """The fitted error of keys and values, by the frames in the statistics; without these, it fits them."""
        statistics, total = self.with_order(statistics), 0.0
        for side in self._smaller_sides():
            errors = self._errors(statistics, side).part(self._order(statistics))
            total += self._error(side, errors, self._frame(statistics, side))
        return total

    def _order(self, statistics: HeadStatistics) -> list[int]:
        """The KV heads, group after group."""
        if not self.counts.reorders:
            return [*range(self.layout.key_value_heads)]
        return statistics.sums[self._order_name].int().tolist()

    def _frame(self, statistics: HeadStatistics, side: str) -> Frame:
        """The frame in the statistics, or a new one."""
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
        sums, size = [statistics.sums[f"{side}.{kind}"] for kind in KINDS], self.layout.head_dim
        shape, expected = sums[0].shape, (self.layout.key_value_heads, PARTS[side], size, size)
        if shape != expected:
            raise ConversionError(
                f"the calibration has {side} heads of the shape {list(shape)}, the layer has {list(expected)}: "
                "it was made for another model"
            )
        return Errors.of(*sums)

    def _error(self, side: str, errors: Errors, frame: Frame) -> float:
        """The error of a side as a square of the layer's output: the statistics of keys lack the factor of logits."""
        return float(errors.total(frame)) * errors.scale / (self.layout.head_dim if side == "key" else 1)

    def _solver(self, side: str) -> Callable[..., Frame]:
        """The function that fits components to heads."""
        if side == "value":
            return aligned_values
        return aligned_keys if self.layout.key_norm_eps is None else mixed_keys


def _singular_vectors(heads: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Components (h', d, hidden) and scalars (h, h') of heads (h, d, hidden)."""
    left, values, right = torch.linalg.svd(heads.flatten(1).T, full_matrices=False)
    return left[:, :count].T.unflatten(1, heads.shape[1:]), (values.unsqueeze(-1) * right)[:count].T


def _absorb_key_maps(tensors: Tensors, maps: torch.Tensor) -> Tensors:
    """The query projection with the maps of the keys that each query head attends to."""
    weight = _joined(tensors, READERS["key"]).unflatten(0, (len(maps), -1, maps.shape[-1]))
    return _split((maps.mT.unsqueeze(1) @ weight).flatten(0, 2), tensors, READERS["key"])


def _absorb_value_maps(tensors: Tensors, maps: torch.Tensor) -> Tensors:
    """The output projection with the maps of the values; its bias does not change."""
    weight = tensors["o_proj.weight"].to(maps).unflatten(1, (len(maps), -1, maps.shape[-1]))
    absorbed = torch.einsum("nhga,hab->nhgb", weight, maps).flatten(1)
    return {"o_proj.weight": absorbed.to(tensors["o_proj.weight"])}


def _names(projection: str) -> list[str]:
    return [f"{projection}.{part}" for part in ("weight", "bias")]


def _joined(tensors: Tensors, projection: str) -> torch.Tensor:
    """A projection in float64, with its bias (if any) as a last column: (rows, hidden)."""
    weight, bias = (tensors.get(name) for name in _names(projection))
    columns = [weight] if bias is None else [weight, bias.unsqueeze(-1)]
    return torch.cat(columns, dim=1).double()  # type: ignore[arg-type]


def _split(joined: torch.Tensor, tensors: Tensors, projection: str) -> Tensors:
    """The inverse of `_joined`, in the dtype of the projection's weight."""
    weight, bias = _names(projection)
    joined = joined.to(tensors[weight].dtype)
    if bias not in tensors:
        return {weight: joined.contiguous()}
    return {weight: joined[:, :-1].contiguous(), bias: joined[:, -1].contiguous()}
