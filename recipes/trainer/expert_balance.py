"""Loss-free balancing of experts: after each step, the biases by which routers choose move against the load.

`bias_i += rate * sign(mean load - load_i)`: Wang et al., Auxiliary-Loss-Free Load Balancing Strategy for
Mixture-of-Experts, 2024. The load is how many tokens of the whole step chose an expert, counted as whole numbers, so
that it does not depend on how the step is divided into micro batches and among processes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from crosshead.common.errors import RecipeError
from crosshead.modeling.backbones.qwen3_moe import BiasedRouter


class ExpertBalance(TrainerCallback):
    """The routers of one model; without a rate, nothing is counted and nothing moves."""

    def __init__(self, model: nn.Module, rate: float | None) -> None:
        named = [] if rate is None else list(model.named_modules())
        self._routers = {name: module for name, module in named if isinstance(module, BiasedRouter)}
        self._rate = rate or 0.0
        self._counts: dict[str, torch.Tensor] = {}
        self._load: dict[str, torch.Tensor] = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count in a forward pass; what a backward pass computes again lies outside."""
        handles = [router.register_forward_hook(self._counter(name)) for name, router in self._routers.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _counter(self, name: str) -> Callable[..., None]:
        def count(router: BiasedRouter, args: Any, output: tuple[torch.Tensor, ...]) -> None:
            chosen = output[2].flatten()
            if name not in self._counts:
                self._counts[name] = chosen.new_zeros(router.num_experts)
            self._counts[name].scatter_add_(0, chosen, torch.ones_like(chosen))

        return count

    @torch.no_grad()
    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Move the biases, once a step."""
        from accelerate.utils import reduce

        for name, router in self._routers.items():
            load = reduce(self._counts.pop(name), "sum")
            router.e_score_correction_bias += self._rate * torch.sign(load.sum() - load * router.num_experts)
            self._load[name] = load

    def load(self) -> dict[str, float]:
        """Of each layer in the last step, the least and the greatest load of an expert, as a part of the mean."""
        found: dict[str, float] = {}
        for name, load in self._load.items():
            parts = load / load.float().mean()
            layer = name.split(".")[2]
            found |= {
                f"expert_load/{layer}/least": parts.min().item(),
                f"expert_load/{layer}/most": parts.max().item(),
            }
        return found


def read_everywhere(accelerator: Any, config: Any, path: str | None) -> None:
    """With FSDP2, let each process keep what it has made, or refuse.

    Where what the first process has read goes to the others, accelerate takes all that is saved for sharded, which
    biases are not.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None or not plugin.cpu_ram_efficient_loading or not getattr(config, "expert_bias", False):
        return
    if path is not None:
        raise RecipeError(
            f"model.path={path} has expert_bias=true, which FSDP shares out only where every process keeps "
            "what it has read: add `--fsdp_cpu_ram_efficient_loading false` to `accelerate launch`"
        )
    plugin.cpu_ram_efficient_loading = False
