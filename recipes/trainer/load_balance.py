"""Load balancing of routed heads and of experts: balance losses, router biases and metrics.

Loss-free balancing of experts updates the router biases after each step: `bias_i += rate * sign(mean load -
load_i)` (Wang et al., Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts, 2024). The load is the
number of tokens that were routed to an expert in the whole step, however the step is divided into micro batches and
processes.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from crosshead.common.errors import RecipeError
from crosshead.modeling.backbones.qwen3_moe import BiasedRouter
from crosshead.modeling.mechanisms.mixture import balance_loss


class HeadRouting:
    """The head routers (mechanism mixture) of one model: scores, balance loss and load."""

    def __init__(self, config: Any) -> None:
        self._selected: dict[int, int] = {}
        for layer in range(len(config.layouts())):
            mixture = config.mixers_of_layer(layer).get("mixture")
            if mixture and (count := mixture["active_heads"] - mixture["shared_heads"]):
                self._selected[layer] = count
        self.layers = tuple(self._selected)
        """Indices of the layers whose router selects heads."""
        self.weight = config.mechanisms().get("mixture", {}).get("balance_weight", 0.0)
        """Weight of the balance loss."""
        modules = config.attention_modules() if hasattr(config, "attention_modules") else []
        of_encoder = [layer for layer, (part, _) in enumerate(modules) if part == "encoder"]
        stacks: dict[bool, list[int]] = {}
        for index, layer in enumerate(self.layers):
            stacks.setdefault(layer in of_encoder, []).append(index)
        self._stacks = list(stacks.values())  # positions in `layers`: the loss is the mean over encoder and decoder

    @classmethod
    def of(cls, config: Any) -> "HeadRouting | None":
        """Return the head routing of a model; None if no router selects heads."""
        routing = cls(config) if hasattr(config, "mixers_of_layer") else None
        return routing if routing is not None and routing.layers else None

    def scores(self, outputs: Any) -> list[torch.Tensor]:
        """Return the router probabilities (..., heads) of each layer in `layers`."""
        return [layer for layer in outputs["head_router_scores"] if layer.shape[-1]]

    def loss_by_sequence(self, outputs: Any, shares: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the sequences' balance losses.

        `shares` (B) is the fraction of the step's predictions in each sequence.

        A balance loss is not a sum over tokens. If it were computed over all tokens of a micro batch, the loss of a
        step would depend on the division into micro batches and processes.
        """

        def of_sequence(*layers: torch.Tensor) -> torch.Tensor:
            losses = []
            for stack in self._stacks:
                scores, selected = [layers[index].unsqueeze(0) for index in stack], [counts[index] for index in stack]
                losses.append(balance_loss(scores, selected, None))
            return torch.stack(losses).mean()

        counts = list(self._selected.values())
        by_sequence = torch.vmap(of_sequence)(*self.scores(outputs))
        return self.weight * (by_sequence * shares).sum()

    def load(self, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return, per layer, the fraction of a micro batch's tokens that select each routed head (heads)."""
        loads = []
        for probabilities, count in zip(scores, self._selected.values(), strict=True):
            selected = probabilities.detach().topk(count, dim=-1).indices
            loads.append(torch.zeros_like(probabilities).scatter(-1, selected, 1.0).flatten(0, -2).float().mean(0))
        return loads


def load_metrics(name: str, loads: Mapping[Any, torch.Tensor]) -> dict[str, float]:
    """Return the minimum and the maximum load of each layer as metrics."""
    metrics: dict[str, float] = {}
    for layer, load in loads.items():
        metrics |= {f"{name}/{layer}/least": load.min().item(), f"{name}/{layer}/most": load.max().item()}
    return metrics


class ExpertBalance(TrainerCallback):
    """Loss-free load balancing of one model's experts; does nothing if the rate is None."""

    def __init__(self, model: nn.Module, rate: float | None) -> None:
        modules = [] if rate is None else list(model.named_modules())
        self._routers = {name: module for name, module in modules if isinstance(module, BiasedRouter)}
        self._rate = rate or 0.0
        self._counts: dict[str, torch.Tensor] = {}
        self._load: dict[str, torch.Tensor] = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count routed tokens inside the block: use it for the forward pass alone, without recomputed layers."""
        with ExitStack() as stack:
            for name, router in self._routers.items():
                stack.enter_context(router.register_forward_hook(partial(self._count, name)))
            yield

    def _count(self, name: str, router: BiasedRouter, args: Any, output: tuple[torch.Tensor, ...]) -> None:
        selected = output[2].flatten()
        if name not in self._counts:
            self._counts[name] = selected.new_zeros(router.num_experts)
        self._counts[name].scatter_add_(0, selected, torch.ones_like(selected))

    @torch.no_grad()
    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Lower the biases of overloaded experts, and raise the biases of the others."""
        from accelerate.utils import reduce

        for name, router in self._routers.items():
            load = reduce(self._counts.pop(name), "sum")
            router.e_score_correction_bias += self._rate * torch.sign(load.sum() - load * router.num_experts)
            self._load[name] = load

    def metrics(self) -> dict[str, float]:
        """Return the minimum and the maximum load per layer in the last step, relative to the mean load."""
        return load_metrics(
            "expert_load", {name.split(".")[2]: load / load.float().mean() for name, load in self._load.items()}
        )


def load_biases_everywhere(accelerator: Any, config: Any, path: str | None) -> None:
    """With FSDP2, let each process initialise its own router biases; raise `RecipeError` if that is impossible.

    If only the main process loads the model, accelerate expects each tensor to be sharded, but biases are not sharded.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None or not plugin.cpu_ram_efficient_loading or not getattr(config, "expert_bias", False):
        return
    if path is not None:
        raise RecipeError(
            f"model.path={path} has expert_bias=true, which FSDP supports only if each process loads the model: add "
            "`--fsdp_cpu_ram_efficient_loading false` to `accelerate launch`"
        )
    plugin.cpu_ram_efficient_loading = False
