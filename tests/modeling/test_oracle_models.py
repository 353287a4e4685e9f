"""Whole models, and the balance loss over several layers, compared with the oracles."""

from typing import Any

import pytest
import torch

import oracle_routing
import oracles
from case_grids import for_each_case_and_backbone
from crosshead.modeling.mechanisms.mixture import balance_loss
from oracle_layers import GRADIENT_TOLERANCE, OPTION_CASES, OUTPUT_TOLERANCE, Layer, oracle_view
from tiers import first
from toys import CASES, mixed_model, tokens


@pytest.mark.parametrize("case", first((n for n, mixers in (CASES | OPTION_CASES).items() if "mixture" in mixers), 8))
def test_balance_loss_follows_the_oracle(case: str) -> None:
    """Compares the balance loss over real tokens and its gradients for all attention parameters."""
    layers = [Layer(backbone, (CASES | OPTION_CASES)[case]) for backbone in ("Llama", "Qwen3")]
    scores: list[torch.Tensor] = []
    routed, selected = [], []
    for layer in layers:
        mixture = layer.attention.mixers["mixture"]
        mixture.register_forward_hook(lambda module, inputs, output: scores.append(output[1]))
        layer.ours()
        _, extras = layer.truth()
        routed.append((extras["probabilities"], extras["selected"]))
        selected.append(mixture.selected_heads)
    ours = balance_loss(scores, selected, layers[0].rows.long())
    truth = oracle_routing.balance_loss(routed, layers[0].rows)
    assert (ours - truth).abs() < OUTPUT_TOLERANCE
    for layer in layers:
        parameters = dict(layer.attention.named_parameters())
        both = [
            torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, retain_graph=True)
            for loss in (ours, truth)
        ]
        assert any(gradient is not None for gradient in both[1])
        for name, gradient, expected in zip(parameters, *both, strict=True):
            assert (gradient is None) is (expected is None), name
            assert gradient is None or (gradient - expected).abs().max() < GRADIENT_TOLERANCE, name


class OracleAttention(torch.nn.Module):
    """Replaces a layer's attention by the oracle inside a whole model."""

    def __init__(self, attention: Any, config: Any, layer: int) -> None:
        super().__init__()
        self.attention = attention
        self.mixers, self.shape = oracle_view(config, layer)

    def forward(self, hidden_states: torch.Tensor, position_embeddings: Any, attention_mask: Any, **_: Any) -> Any:
        """Return the oracle's output and no weights."""
        cos, sin = (table.expand(hidden_states.shape[0], -1, -1) for table in position_embeddings)
        weights = dict(self.attention.named_parameters())
        allowed = attention_mask[:, 0] == 0
        output, _ = oracles.attention_layer(hidden_states, weights, self.shape, self.mixers, cos, sin, allowed)
        return output, None


@for_each_case_and_backbone
def test_whole_model_follows_the_oracle(case: str, backbone: str) -> None:
    model = mixed_model(backbone, CASES[case]).double()
    model.set_experts_implementation("eager")  # the default does not support float64
    ids = tokens(2, 6)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    parameters = dict(model.named_parameters())
    direction = torch.randn(2, 6, 61, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def run() -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        logits = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
        return logits, torch.autograd.grad((logits * direction[mask.bool()]).sum(), parameters.values())

    ours, gradients = run()
    for index, layer in enumerate(model.model.layers):
        if model.config.mixers_of_layer(index):
            layer.self_attn = OracleAttention(layer.self_attn, model.config, index)
    truth, expected = run()
    assert (ours - truth).abs().max() < 1e-6
    for name, gradient, reference in zip(parameters, gradients, expected, strict=True):
        assert (gradient - reference).abs().max() < 1e-6, name
