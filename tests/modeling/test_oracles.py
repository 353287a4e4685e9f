"""Every mechanism, with every option, against the slow loops written from the papers: outputs and gradients."""

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
from crosshead.modeling.balance import balance_loss
from transformers import DynamicCache

import oracles
from crosshead import MECHANISMS
from toys import BACKBONES, CASES, MECHANISM_CASES, SIZES, mixed_model, tokens

OUTPUT_TOLERANCE = 1e-10
GRADIENT_TOLERANCE = 1e-8
LAYER = 1

OPTION_CASES: dict[str, dict[str, Any]] = {
    **{
        f"knocking {form} on {'+'.join(on)}": {"knocking": {"form": form, "on": on}}
        for form in ("mlp", "linear", "gate")
        for on in (["value"], ["query", "key", "value"])
    },
    "explicit as many components": {"explicit": {}},
    "explicit without norm": {"explicit": {"norm": False, "key_heads": 1}},
    "explicit keys": {"explicit": {"on": ["key"], "key_heads": 1}},
    "explicit values": {"explicit": {"on": ["value"], "value_heads": 1, "norm": False}},
    **{
        f"mixture {router} {gate} {scale} {shared} shared": {
            "mixture": {
                "shared_heads": shared,
                "active_heads": active,
                "router": router,
                "gate": gate,
                "gate_scale": scale,
            }
        }
        for router in ("two_stage", "query_norm")
        for gate, scale in (("weighted", "unit"), ("weighted", "paper"), ("binary", "unit"))
        for shared, active in ((0, 2), (1, 3), (2, 4))
    },
    "talking": {"talking": {}},
    "talking logits": {"talking": {"on": ["logits"], "dynamic": ["query_logits"]}},
    "talking weights": {"talking": {"on": ["weights"], "dynamic": ["key_weights"]}},
    "talking fewer softmax heads": {"talking": {"softmax_heads": 3, "dynamic": ["key_logits", "query_weights"]}},
    "differential without norm": {"differential": {"norm": False}},
    "differential + mixture": {
        "differential": {},
        "mixture": {"shared_heads": 1, "active_heads": 2, "gate_scale": "paper"},
    },
    "mixture before knocking": {
        "mixture": {"shared_heads": 1, "active_heads": 2, "router": "query_norm"},
        "knocking": {"on": ["query"]},
    },
}


def rope_tables(positions: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 tables (B, T, d): the library computes its own in float32."""
    frequencies = 100.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = positions[..., None].double() * frequencies
    return torch.cat([angles, angles], dim=-1).cos(), torch.cat([angles, angles], dim=-1).sin()


def visible(padding: list[int], length: int) -> torch.Tensor:
    """(B, T, S): causal, and without the padding on the left of each sequence."""
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    real = torch.stack([torch.arange(length) >= count for count in padding])
    return causal & real[:, None, :]


def additive(allowed: torch.Tensor) -> torch.Tensor:
    """The mask as the library hands it to eager attention."""
    return torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, torch.finfo(torch.float64).min)[
        :, None
    ]


def oracle_view(config: Any, layer: int) -> tuple[dict[str, dict[str, Any]], oracles.LayerShape]:
    """What the oracle wants to know of a layer: complete options, counts that a config may leave out included."""
    absent = {
        "explicit": {"key_heads": config.num_key_value_heads, "value_heads": config.num_key_value_heads},
        "talking": {"softmax_heads": config.num_attention_heads},
    }
    mixers = {name: absent.get(name, {}) | options for name, options in config.mixers_of_layer(layer).items()}
    shape = oracles.LayerShape(
        query_heads=config.num_attention_heads,
        key_value_heads=config.num_key_value_heads,
        head_dim=SIZES["head_dim"],
        layer_index=layer,
        norm_eps=config.rms_norm_eps,
        has_qk_norm="qwen3" in config.model_type,
    )
    return mixers, shape


class Layer:
    """One attention layer in float64 with inputs, and the oracle's view of it."""

    def __init__(self, backbone: str, mixers: dict[str, Any], padding: tuple[int, int] = (0, 2), **changes: Any):
        model = mixed_model(backbone, mixers, attention_dropout=0.0, **changes).double()
        self.attention = model.model.layers[LAYER].self_attn
        config = model.config
        self.mixers, self.shape = oracle_view(config, LAYER)
        length = 7
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(2, length, config.hidden_size, generator=generator, dtype=torch.float64)
        self.inputs = self.inputs * torch.linspace(0.5, 2.0, config.hidden_size, dtype=torch.float64)
        self.allowed = visible(list(padding), length)
        self.rows = self.allowed.any(-1)  # a query that sees nothing has no defined gradient
        self.cos, self.sin = rope_tables(torch.arange(length).expand(2, -1), SIZES["head_dim"])

    def ours(self, cache: Any = None, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """The layer's output for the tokens from `start` to `stop`."""
        part = slice(start, stop)
        output, _ = self.attention(
            self.inputs[:, part],
            position_embeddings=(self.cos[:, part], self.sin[:, part]),
            attention_mask=additive(self.allowed[:, part, :stop]),
            past_key_values=cache,
        )
        return output

    def truth(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The oracle's output."""
        weights = dict(self.attention.named_parameters())
        return oracles.attention_layer(self.inputs, weights, self.shape, self.mixers, self.cos, self.sin, self.allowed)

    def gradients(self, output: torch.Tensor) -> dict[str, torch.Tensor]:
        """Gradients of a lopsided sum over the real rows, by input and parameter."""
        generator = torch.Generator().manual_seed(9)
        direction = torch.randn(output.shape, generator=generator, dtype=torch.float64) * self.rows[..., None]
        named = {"inputs": self.inputs, **dict(self.attention.named_parameters())}
        found = torch.autograd.grad((output * direction).sum(), list(named.values()), allow_unused=True)
        return {
            name: torch.zeros_like(named[name]) if gradient is None else gradient
            for name, gradient in zip(named, found, strict=True)
        }


def assert_layer_agrees(layer: Layer, run: Callable[[], torch.Tensor] | None = None) -> None:
    """Outputs, then every gradient."""
    layer.inputs.requires_grad_(True)
    ours, (truth, _) = (run or layer.ours)(), layer.truth()
    assert (ours - truth)[layer.rows].abs().max() < OUTPUT_TOLERANCE
    assert truth[layer.rows].abs().max() > 0.1
    found, expected = layer.gradients(ours), layer.gradients(truth)
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() < GRADIENT_TOLERANCE, name


def test_every_mechanism_has_an_oracle_and_a_case() -> None:
    assert set(oracles.ORACLES) == set(MECHANISMS) == set(MECHANISM_CASES)


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("case", CASES)
def test_layer(case: str, backbone: str) -> None:
    assert_layer_agrees(Layer(backbone, CASES[case]))


@pytest.mark.parametrize("backbone", ("Llama", "Qwen3"))
@pytest.mark.parametrize("case", OPTION_CASES)
def test_layer_options(case: str, backbone: str) -> None:
    assert_layer_agrees(Layer(backbone, OPTION_CASES[case]))


PAIRABLE: dict[str, dict[str, Any]] = {
    "knocking": {"on": ["query", "key", "value"]},
    "explicit": {"value_heads": 1},
    "explicit without norm": {"key_heads": 1, "norm": False},
    "mixture": {"shared_heads": 1, "active_heads": 2},
    "mixture by query norm": {"shared_heads": 0, "active_heads": 2, "router": "query_norm"},
    "talking": {"softmax_heads": 3, "dynamic": ["key_logits"]},
    "differential": {},
}
REFUSED = {
    ("explicit", "differential"),
    ("differential", "explicit"),
    ("talking", "differential"),
    ("differential", "talking"),
    ("mixture by query norm", "differential"),
    ("differential", "mixture by query norm"),
    ("mixture", "explicit"),
    ("mixture by query norm", "explicit"),
}
PAIRS = [pair for pair in permutations(PAIRABLE, 2) if pair[0].split()[0] != pair[1].split()[0]]


@pytest.mark.parametrize("pair", PAIRS)
def test_any_two_mechanisms(pair: tuple[str, str]) -> None:
    """Two mechanisms in either order follow the oracle, or are refused with a reason when the config is made."""
    mixers = {name.split()[0]: PAIRABLE[name] for name in pair}
    if pair in REFUSED:
        with pytest.raises(ValueError, match="mixers"):
            Layer("Qwen3", mixers)
    else:
        assert_layer_agrees(Layer("Qwen3", mixers))


@pytest.mark.parametrize("heads", ((4, 4), (4, 1), (6, 2), (8, 4)))
@pytest.mark.parametrize("mechanism", MECHANISM_CASES)
def test_layer_head_counts(mechanism: str, heads: tuple[int, int]) -> None:
    mixers = {"explicit": {"explicit": {}}}.get(mechanism, MECHANISM_CASES[mechanism])
    if mechanism == "differential" and heads[1] == 1:
        pytest.skip("differential pairs key/value heads")
    assert_layer_agrees(Layer("Llama", mixers, num_attention_heads=heads[0], num_key_value_heads=heads[1]))


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("case", CASES)
def test_layer_with_a_cache(case: str, backbone: str) -> None:
    layer = Layer(backbone, CASES[case])
    cache = DynamicCache()
    parts = ((0, 4), (4, 6), (6, 7))
    assert_layer_agrees(layer, lambda: torch.cat([layer.ours(cache, *part) for part in parts], dim=1))


@pytest.mark.parametrize("case", [name for name, mixers in CASES.items() if "mixture" in mixers])
def test_routing(case: str) -> None:
    layer = Layer("Llama", CASES[case])
    seen: list[Any] = []
    layer.attention.mixers["mixture"].register_forward_hook(lambda module, inputs, output: seen.append(output))
    layer.ours()
    _, truth = layer.truth()
    gates, probabilities = seen[0]
    assert (gates - truth["gates"]).abs().max() < OUTPUT_TOLERANCE
    assert (probabilities - truth["probabilities"]).abs().max() < OUTPUT_TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_attention_weights(case: str) -> None:
    layer = Layer("Llama", CASES[case])
    _, weights = layer.attention(
        layer.inputs, position_embeddings=(layer.cos, layer.sin), attention_mask=additive(layer.allowed)
    )
    _, truth = layer.truth()
    assert (weights - truth["weights"]).transpose(1, 2)[layer.rows].abs().max() < OUTPUT_TOLERANCE


@pytest.mark.parametrize("case", [name for name, mixers in (CASES | OPTION_CASES).items() if "mixture" in mixers])
def test_balance_loss(case: str) -> None:
    """The value, and the gradients of what makes the probabilities, without the padding."""
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
    truth = oracles.balance_loss(routed, layers[0].rows)
    assert (ours - truth).abs() < OUTPUT_TOLERANCE
    for layer in layers:
        parameters = dict(layer.attention.named_parameters())
        both = [
            torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, retain_graph=True)
            for loss in (ours, truth)
        ]
        assert any(gradient is not None for gradient in both[1])
        for name, found, wanted in zip(parameters, *both, strict=True):
            assert (found is None) is (wanted is None), name
            assert found is None or (found - wanted).abs().max() < GRADIENT_TOLERANCE, name


class OracleAttention(torch.nn.Module):
    """Stands in for a layer's attention inside a whole model."""

    def __init__(self, attention: Any, config: Any, layer: int) -> None:
        super().__init__()
        self.attention = attention
        self.mixers, self.shape = oracle_view(config, layer)

    def forward(self, hidden_states: torch.Tensor, position_embeddings: Any, attention_mask: Any, **_: Any) -> Any:
        """The oracle's output."""
        cos, sin = (table.expand(hidden_states.shape[0], -1, -1) for table in position_embeddings)
        weights = dict(self.attention.named_parameters())
        allowed = attention_mask[:, 0] == 0
        output, _ = oracles.attention_layer(hidden_states, weights, self.shape, self.mixers, cos, sin, allowed)
        return output, None


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("case", CASES)
def test_whole_model(case: str, backbone: str) -> None:
    model = mixed_model(backbone, CASES[case]).double()
    model.set_experts_implementation("eager")  # the default one knows no float64
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
    for name, found, wanted in zip(parameters, gradients, expected, strict=True):
        assert (found - wanted).abs().max() < 1e-6, name
