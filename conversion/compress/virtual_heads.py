"""Fewer key and value heads: the rewrite of one attention layer for the `explicit` mechanism.

Method `svd` is the paper's: the singular value decomposition of a projection's weights, one column for each head. It
needs no text, and a model must be trained afterwards. Method `aligned` needs `HeadStatistics` and loses far less: see
`aligned_frame`, `aligned_keys`, `aligned_values` and `fitted_output`. Both leave a side alone that keeps as many
components as heads.

Paper: "Explicit Multi-head Attention for Inter-head Interaction in Large Language Models", appendix F.
"""

from dataclasses import dataclass

import torch

from crosshead.common.errors import ConversionError
from crosshead.modeling.mechanisms.base import HeadLayout

from ..architectures.families import Shapes
from ..calibration.head_statistics import KINDS, PARTS, HeadStatistics
from .aligned_frame import Errors, Frame
from .aligned_maps import aligned_keys, aligned_values, mixed_keys
from .layer_rewrites import Tensors

METHODS = ("aligned", "svd")
PROJECTIONS = {"key": "k_proj", "value": "v_proj"}
READERS = {"key": "q_proj", "value": "o_proj"}
"""The projection that takes in the maps of a side's heads."""
FRAME = ("components", "scalars", "maps")


@dataclass(frozen=True)
class _Side:
    """Keys or values with fewer components."""

    weight: torch.Tensor
    """The components, their biases as a last column where there are biases: (h', d, hidden)."""
    scalars: torch.Tensor
    """(h, h')."""
    maps: torch.Tensor | None
    """(h, d, d); None where nothing is taken in."""


def rewritten_names(layout: HeadLayout, key_heads: int, value_heads: int, method: str) -> list[str]:
    """The names of the tensors, within the layer's attention, that `rewrite` changes or creates, biases included."""
    names = []
    for side, count in (("key", key_heads), ("value", value_heads)):
        if count == layout.key_value_heads:
            continue
        names += [f"mixers.explicit.{side}.weight", *_names(PROJECTIONS[side])]
        if method == "aligned" and side == "key" and layout.key_norm_eps is None:
            names += _names(READERS[side])
    if method == "aligned" and names:  # for the maps of values, and because it may be fitted anew
        names += _names(READERS["value"])
    return names


def solved(statistics: HeadStatistics, layout: HeadLayout, key_heads: int, value_heads: int) -> Tensors:
    """What takes time for so many components, by the names under which the statistics may hold it."""
    found: Tensors = {}
    for side, count in (("key", key_heads), ("value", value_heads)):
        if count < layout.key_value_heads:
            frame = _frame(statistics, layout, side, count)
            found |= {f"{_frame_name(side, count)}.{part}": getattr(frame, part) for part in FRAME}
    return found


def shapes_of_solved(layout: HeadLayout, key_heads: int, value_heads: int, biased: bool) -> Shapes:
    """Of these, and of `output_name`."""
    heads, size = layout.key_value_heads, layout.head_dim
    found: Shapes = {output_name(key_heads, value_heads): (layout.hidden_size, layout.query_heads * size)}
    for side, count in (("key", key_heads), ("value", value_heads)):
        shapes = ((count, size, heads * size + biased), (heads, count), (heads, size, size))
        found |= {f"{_frame_name(side, count)}.{part}": shape for part, shape in zip(FRAME, shapes, strict=True)}
    return found


def output_name(key_heads: int, value_heads: int) -> str:
    """Under which statistics may hold what is to be added to the output projection."""
    return f"output.{key_heads}x{value_heads}"


def rewrite(
    tensors: Tensors,
    statistics: HeadStatistics | None,
    layout: HeadLayout,
    key_heads: int,
    value_heads: int,
    method: str,
) -> Tensors:
    """The layer's attention tensors for `key_heads` and `value_heads` components, from those for all heads."""
    tensors = _with_output(tensors, statistics if method == "aligned" else None, key_heads, value_heads)
    new = dict(tensors)
    for side, count in (("key", key_heads), ("value", value_heads)):
        made = _compressed(tensors, statistics, layout, side, count, method)
        new |= _split(made.weight.flatten(0, 1), tensors, PROJECTIONS[side])
        new[f"mixers.explicit.{side}.weight"] = made.scalars.to(tensors["q_proj.weight"])
        if made.maps is not None:
            new |= _READ[side](tensors, made.maps)
    return new


def approximate(
    tensors: Tensors,
    statistics: HeadStatistics | None,
    layout: HeadLayout,
    key_heads: int,
    value_heads: int,
    method: str,
) -> Tensors:
    """Stock tensors of the same layer with which it computes what it computes after `rewrite`, rounding aside."""
    tensors = _with_output(tensors, statistics if method == "aligned" else None, key_heads, value_heads)
    new = dict(tensors)
    for side, count in (("key", key_heads), ("value", value_heads)):
        made = _compressed(tensors, statistics, layout, side, count, method)
        heads = torch.einsum("ij,jdn->idn", made.scalars, made.weight)
        heads = heads if made.maps is None else made.maps @ heads
        new |= _split(heads.flatten(0, 1), tensors, PROJECTIONS[side])
    return new


def _compressed(
    tensors: Tensors, statistics: HeadStatistics | None, layout: HeadLayout, side: str, count: int, method: str
) -> _Side:
    weight = _joined(tensors, PROJECTIONS[side]).unflatten(0, (layout.key_value_heads, -1))
    if count == layout.key_value_heads:
        return _Side(weight, torch.eye(count).to(weight), None)
    if method == "svd":
        left, values, right = torch.linalg.svd(weight.flatten(1).T, full_matrices=False)
        components = left[:, :count].T.unflatten(1, weight.shape[1:])
        return _Side(components, (values.unsqueeze(-1) * right)[:count].T, None)
    if statistics is None:
        raise ConversionError(f"method={method!r} needs statistics: calibrate first, or take method='svd'")
    frame = _frame(statistics, layout, side, count)
    features = weight.flatten(0, 1)
    if f"{PROJECTIONS[side]}.bias" in tensors:
        one = torch.eye(features.shape[1]).to(features)[-1:]
        features = torch.cat([features, one])
    takes_in = side == "value" or layout.key_norm_eps is None
    return _Side(frame.components @ features, frame.scalars, frame.maps if takes_in else None)


def _with_output(tensors: Tensors, statistics: HeadStatistics | None, key_heads: int, value_heads: int) -> Tensors:
    """The same with the fitted output projection, where there is one."""
    change = None if statistics is None else statistics.sums.get(output_name(key_heads, value_heads))
    if change is None:
        return tensors
    return tensors | {"o_proj.weight": tensors["o_proj.weight"] + change.to(tensors["o_proj.weight"])}


def _frame_name(side: str, count: int) -> str:
    return f"{side}.frame.{count}"


def _frame(statistics: HeadStatistics, layout: HeadLayout, side: str, count: int) -> Frame:
    sums = [statistics.sums[f"{side}.{kind}"] for kind in KINDS]
    seen, wanted = sums[0].shape, (layout.key_value_heads, PARTS[side], layout.head_dim, layout.head_dim)
    if seen != wanted:
        raise ConversionError(
            f"the calibration saw {side} heads of the form {list(seen)}, the layer has {list(wanted)}: "
            "it was made for another model"
        )
    held = [statistics.sums.get(f"{_frame_name(side, count)}.{part}") for part in FRAME]
    if all(part is not None for part in held):
        return Frame(*held)  # type: ignore[arg-type]
    errors = Errors.of(*sums)
    if side == "value":
        return aligned_values(errors, count)
    return (aligned_keys if layout.key_norm_eps is None else mixed_keys)(errors, count)


def _read_keys(tensors: Tensors, maps: torch.Tensor) -> Tensors:
    """Queries that undo the maps of the keys they meet."""
    weight = _joined(tensors, READERS["key"]).unflatten(0, (len(maps), -1, maps.shape[-1]))
    return _split((maps.mT.unsqueeze(1) @ weight).flatten(0, 2), tensors, READERS["key"])


def _read_values(tensors: Tensors, maps: torch.Tensor) -> Tensors:
    """An output projection that undoes the maps of the values it reads; its bias stays."""
    weight = tensors["o_proj.weight"].to(maps).unflatten(1, (len(maps), -1, maps.shape[-1]))
    read = torch.einsum("nhga,hab->nhgb", weight, maps).flatten(1)
    return {"o_proj.weight": read.to(tensors["o_proj.weight"])}


_READ = {"key": _read_keys, "value": _read_values}


def _names(projection: str) -> list[str]:
    return [f"{projection}.{part}" for part in ("weight", "bias")]


def _joined(tensors: Tensors, projection: str) -> torch.Tensor:
    """A projection in float64, its bias as a last column where it has one: (rows, hidden)."""
    weight, bias = (tensors.get(name) for name in _names(projection))
    columns = [weight] if bias is None else [weight, bias.unsqueeze(-1)]
    return torch.cat(columns, dim=1).double()  # type: ignore[arg-type]


def _split(joined: torch.Tensor, tensors: Tensors, projection: str) -> Tensors:
    """The opposite, in the dtype of the projection's own weight."""
    weight, bias = _names(projection)
    joined = joined.to(tensors[weight].dtype)
    if bias not in tensors:
        return {weight: joined.contiguous()}
    return {weight: joined[:, :-1].contiguous(), bias: joined[:, -1].contiguous()}
