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


def rewritten_names(layout: HeadLayout, counts: Counts, method: str) -> list[str]:
    """The tensors, within the layer's attention, that `rewrite` changes or creates; includes possible biases."""
    names = []
    for side, count in counts.sides.items():
        if count == layout.key_value_heads:
            continue
        names += [f"mixers.explicit.{side}.weight", *_names(PROJECTIONS[side])]
        if method == "aligned" and side == "key" and layout.key_norm_eps is None:
            names += _names(READERS[side])
    if method == "aligned" and names:  # it absorbs the maps of values, and may be fitted
        names += _names(READERS["value"])
    if counts.reorders:
        names += [name for projection in (*PROJECTIONS.values(), *READERS.values()) for name in _names(projection)]
    return names


def solved(statistics: HeadStatistics, layout: HeadLayout, counts: Counts) -> Tensors:
    """The order and the frames for these counts, by their names in the statistics; they take time to compute."""
    statistics = with_order(statistics, layout, counts)
    tensors: Tensors = {_order_name(counts): statistics.sums[_order_name(counts)]} if counts.reorders else {}
    for side, count in counts.sides.items():
        if count < layout.key_value_heads:
            frame = _frame(statistics, layout, side, counts)
            tensors |= {_frame_name(side, counts, part): getattr(frame, part) for part in FRAME}
    return tensors


def shapes_of_solved(layout: HeadLayout, counts: Counts, biased: bool) -> Shapes:
    """The shapes of these tensors, of the change of the output projection, and of the tensors fitted by steps."""
    heads, size = layout.key_value_heads, layout.head_dim
    shapes: Shapes = {output_name(counts): (layout.hidden_size, layout.query_heads * size)}
    if counts.reorders:
        shapes[_order_name(counts)] = (heads,)
    for side, count in counts.sides.items():
        if count < heads:
            of_frame = ((count, size, heads * size + biased), (heads, count), (heads, size, size))
            shapes |= {_frame_name(side, counts, part): shape for part, shape in zip(FRAME, of_frame, strict=True)}
    rows = {"q_proj": layout.query_heads * size, "k_proj": counts.key * size, "v_proj": counts.value * size}
    of_part: Shapes = {f"{name}.weight": (count, layout.hidden_size) for name, count in rows.items()}
    of_part |= {f"{name}.bias": (count,) for name, count in rows.items() if biased}
    of_part["o_proj.weight"] = shapes[output_name(counts)]
    of_part |= {f"mixers.explicit.{side}.weight": (heads, n // counts.groups) for side, n in counts.sides.items()}
    parts = fitted_parts(layout, counts)
    return shapes | {fitted_name(counts, part): shape for part, shape in of_part.items() if part in parts}


def fitted_parts(layout: HeadLayout, counts: Counts) -> list[str]:
    """The tensors that are fitted by steps: none of a side that keeps all its heads; includes possible biases."""
    return sorted({*rewritten_names(layout, replace(counts, reorders=False), "aligned")} - {"o_proj.bias"})


def fitted_name(counts: Counts, part: str) -> str:
    """The name, in the statistics, of a tensor that is fitted by steps."""
    return f"fitted.{counts.label(f'{counts.key}x{counts.value}')}.{part}"


def output_name(counts: Counts) -> str:
    """The name, in the statistics, of the change of the output projection."""
    return f"output.{counts.label(f'{counts.key}x{counts.value}')}"


def rewrite(
    tensors: Tensors, statistics: HeadStatistics | None, layout: HeadLayout, counts: Counts, method: str
) -> Tensors:
    """The layer's attention tensors with component heads, from those for all heads."""
    tensors, sides = _compress(tensors, statistics, layout, counts, method)
    new = dict(tensors)
    for side, compressed in sides.items():
        new |= _split(compressed.components.flatten(0, 1), tensors, PROJECTIONS[side])
        new[f"mixers.explicit.{side}.weight"] = compressed.blocks(counts.groups).to(tensors["q_proj.weight"])
        if compressed.maps is not None:
            absorb = _absorb_key_maps if side == "key" else _absorb_value_maps
            new |= absorb(tensors, compressed.maps)
    if method == "aligned" and statistics is not None:
        fitted = {part: statistics.sums.get(fitted_name(counts, part)) for part in fitted_parts(layout, counts)}
        new |= {part: tensor.to(tensors["q_proj.weight"]) for part, tensor in fitted.items() if tensor is not None}
    return new


def approximate(
    tensors: Tensors, statistics: HeadStatistics | None, layout: HeadLayout, counts: Counts, method: str
) -> Tensors:
    """Stock attention tensors equivalent to those of `rewrite` before the steps; no projection absorbs a map."""
    tensors, sides = _compress(tensors, statistics, layout, counts, method)
    new = dict(tensors)
    for side, compressed in sides.items():
        new |= _split(compressed.heads().flatten(0, 1), tensors, PROJECTIONS[side])
    return new


def _compress(
    tensors: Tensors, statistics: HeadStatistics | None, layout: HeadLayout, counts: Counts, method: str
) -> tuple[Tensors, dict[str, _Compressed]]:
    """The tensors with their heads in order and the fitted output projection; and the compressed keys and values."""
    if counts.reorders and statistics is not None:
        statistics = with_order(statistics, layout, counts)
        tensors = reorder(tensors, query_order(_order(statistics, layout, counts), layout), layout)
    if method == "aligned" and statistics is not None and output_name(counts) in statistics.sums:
        output, change = tensors["o_proj.weight"], statistics.sums[output_name(counts)]
        tensors = tensors | {"o_proj.weight": output + change.to(output)}
    return tensors, {side: _compress_side(tensors, statistics, layout, side, counts, method) for side in PROJECTIONS}


def _compress_side(
    tensors: Tensors, statistics: HeadStatistics | None, layout: HeadLayout, side: str, counts: Counts, method: str
) -> _Compressed:
    weight = _joined(tensors, PROJECTIONS[side]).unflatten(0, (layout.key_value_heads, -1))
    count = counts.sides[side]
    if count == layout.key_value_heads:
        return _Compressed(weight, torch.eye(count).to(weight), None)
    if method == "svd":
        parts = [_singular_vectors(heads, count // counts.groups) for heads in weight.chunk(counts.groups)]
        components, scalars = zip(*parts, strict=True)
        return _Compressed(torch.cat(components), torch.block_diag(*scalars), None)
    if statistics is None:
        raise ConversionError(f"method={method!r} needs statistics: calibrate first, or use method='svd'")
    frame = _frame(statistics, layout, side, counts)
    features = weight.flatten(0, 1)
    if f"{PROJECTIONS[side]}.bias" in tensors:  # the last feature is the number 1
        one = torch.eye(features.shape[1]).to(features)[-1:]
        features = torch.cat([features, one])
    absorbs = side == "value" or layout.key_norm_eps is None
    return _Compressed(frame.components @ features, frame.scalars, frame.maps if absorbs else None)


def _singular_vectors(heads: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Components (h', d, hidden) and scalars (h, h') of heads (h, d, hidden)."""
    left, values, right = torch.linalg.svd(heads.flatten(1).T, full_matrices=False)
    return left[:, :count].T.unflatten(1, heads.shape[1:]), (values.unsqueeze(-1) * right)[:count].T


def with_order(statistics: HeadStatistics, layout: HeadLayout, counts: Counts) -> HeadStatistics:
    """The statistics, with the KV heads group after group: a search for the minimum error, unless they have it."""
    name, heads = _order_name(counts), layout.key_value_heads
    if name in statistics.sums or not counts.reorders:
        return statistics
    sides = {side: _errors(statistics, layout, side) for side, count in counts.sides.items() if count < heads}

    def cost(group: Group) -> float:
        total = 0.0
        for side, errors in sides.items():
            part = errors.part(group)
            components = min(counts.sides[side] // counts.groups, len(group) - 1)
            frame = _solver(layout, side)(part, components, refines=False)
            total += float(part.total(frame)) * errors.scale * _factor(layout, side)
        return total

    order = [head for group in equal_groups(heads, counts.groups, cost) for head in group]
    return HeadStatistics(layout, statistics.sums | {name: torch.tensor(order, dtype=torch.float64)})


def fitted_error(statistics: HeadStatistics, layout: HeadLayout, counts: Counts) -> float:
    """The fitted error of a layer's keys and values, by the frames in the statistics; without these, it fits them."""
    statistics, total = with_order(statistics, layout, counts), 0.0
    for side, count in counts.sides.items():
        if count < layout.key_value_heads:
            errors = _errors(statistics, layout, side).part(_order(statistics, layout, counts))
            frame = _frame(statistics, layout, side, counts)
            total += float(errors.total(frame)) * errors.scale * _factor(layout, side)
    return total


def _order(statistics: HeadStatistics, layout: HeadLayout, counts: Counts) -> list[int]:
    """The KV heads, group after group."""
    return statistics.sums[_order_name(counts)].int().tolist() if counts.reorders else [*range(layout.key_value_heads)]


def _order_name(counts: Counts) -> str:
    return f"order.{counts.label('')}"


def _frame_name(side: str, counts: Counts, part: str) -> str:
    return f"{side}.frame.{counts.label(str(counts.sides[side]))}.{part}"


def _frame(statistics: HeadStatistics, layout: HeadLayout, side: str, counts: Counts) -> Frame:
    """The frame in the statistics, or a new one."""
    cached = [statistics.sums.get(_frame_name(side, counts, part)) for part in FRAME]
    if all(part is not None for part in cached):
        return Frame(*cached)  # type: ignore[arg-type]
    errors, solve = _errors(statistics, layout, side), _solver(layout, side)
    if counts.groups == 1:
        return solve(errors, counts.sides[side])
    order, size = _order(statistics, layout, counts), layout.key_value_heads // counts.groups
    groups = [order[start : start + size] for start in range(0, len(order), size)]
    return Frame.joined([solve(errors.part(group), counts.sides[side] // counts.groups) for group in groups])


def _errors(statistics: HeadStatistics, layout: HeadLayout, side: str) -> Errors:
    sums = [statistics.sums[f"{side}.{kind}"] for kind in KINDS]
    shape, expected = sums[0].shape, (layout.key_value_heads, PARTS[side], layout.head_dim, layout.head_dim)
    if shape != expected:
        raise ConversionError(
            f"the calibration has {side} heads of the shape {list(shape)}, the layer has {list(expected)}: "
            "it was made for another model"
        )
    return Errors.of(*sums)


def _factor(layout: HeadLayout, side: str) -> float:
    """A side's errors as squares of the layer's output: the statistics of keys leave out the factor of the logits."""
    return 1 / layout.head_dim if side == "key" else 1.0


def _solver(layout: HeadLayout, side: str) -> Callable[..., Frame]:
    """The function that fits components to heads."""
    if side == "value":
        return aligned_values
    return aligned_keys if layout.key_norm_eps is None else mixed_keys


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
