"""The biases by which routers choose experts: in a checkpoint of ours, where its config says so; in no stock one."""

from typing import Any

import torch

from crosshead.modeling.backbones.qwen3_moe import EXPERT_BIAS

from .errors import ConversionError
from .families import Shapes
from .store import TensorStore

ROUTER = "mlp.gate.weight"


def bias_shapes(config: Any, shapes: Shapes) -> Shapes:
    """The names and shapes of the biases, given the stock tensors; float32 whatever the dtype of those."""
    if not getattr(config, "expert_bias", False):
        return {}
    routers = {name: shape for name, shape in shapes.items() if name.endswith(ROUTER)}
    return {name.removesuffix("weight") + EXPERT_BIAS: shape[:1] for name, shape in routers.items()}


def dropped_biases(store: TensorStore, config: Any, shapes: Shapes) -> dict[str, str]:
    """The biases with why a stock checkpoint does without; `ConversionError` where one chooses other experts."""
    names = bias_shapes(config, shapes)
    for name in names:
        bias = store.read(name)
        if not torch.equal(bias, torch.zeros_like(bias)):
            raise ConversionError(
                f"{name} is not zero, so it cannot be folded into a stock layer: a stock router chooses its experts "
                "without a bias"
            )
    return dict.fromkeys(names, "zero, so it chooses no other experts")
