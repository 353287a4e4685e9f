"""Regression tests: one test per defect of an earlier version of the models."""

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import crosshead
from crosshead.modeling.mechanisms.base import AttentionState, HeadLayout, ParameterModule
from crosshead.modeling.mechanisms.explicit import Explicit
from crosshead.modeling.mechanisms.knocking import Knocking
from crosshead.modeling.ops import inverse_rms
from oracle_layers import Layer, additive
from toys import CASES, MECHANISM_CASES, mixed_config, mixed_model, tokens

MODELING = Path(crosshead.__file__).parents[1] / "modeling"
FEWER = {"explicit": {"key_heads": 2, "value_heads": 2, "norm": False}}


def decoded_logits(model: Any, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """Return the logits of a prompt and of the tokens after it, decoded one by one."""
    cache = DynamicCache(config=model.config)
    parts = [model(ids[:, :prompt], past_key_values=cache).logits]
    parts += [model(ids[:, at : at + 1], past_key_values=cache).logits for at in range(prompt, ids.shape[1])]
    return torch.cat(parts, dim=1)


def attention_error(backbone: str, implementation: str, decode: bool = True) -> torch.Tensor:
    """Return the relative error of one layer's bfloat16 outputs against float64, of decoded or of all tokens."""
    sizes = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    model: Any = mixed_model(backbone, FEWER, implementation, num_hidden_layers=1, **sizes)
    outputs: list[torch.Tensor] = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *call: outputs.append(call[2][0].double()))
    outputs_by_dtype = []
    for dtype in (torch.float64, torch.bfloat16):
        outputs.clear()
        rounded = model.bfloat16() if dtype == torch.float64 else model  # the same weights in both
        decoded_logits(rounded.to(dtype), tokens(2, 40), 20 if decode else 40)
        outputs_by_dtype.append(torch.cat(outputs[1:] if decode else outputs, dim=1))
    return (outputs_by_dtype[1] - outputs_by_dtype[0]).norm() / outputs_by_dtype[0].norm()


@pytest.mark.parametrize("backbone", ("Llama", "Qwen3"))
@torch.no_grad()
def test_bfloat16_explicit_decoding_is_as_accurate_as_eager(backbone: str) -> None:
    """Defect: `1 / rms` was cached in the dtype of the keys, and logits were rounded before the softmax."""
    assert attention_error(backbone, "sdpa") < 1.1 * attention_error(backbone, "eager")


@torch.no_grad()
def test_cached_key_scales_are_as_accurate_as_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect: scales were cached as one half-precision number, now as a sum of two; outputs had 5% more error here."""
    exact: dict[Any, torch.Tensor] = {}
    store = Explicit.before_rope

    def keep(mechanism: Any, state: AttentionState) -> None:
        exact[mechanism] = inverse_rms(mechanism.key(state.key), mechanism.layout.key_norm_eps).squeeze(-1)
        store(mechanism, state)
        error = mechanism._key_scale(state) / exact[mechanism] - 1
        assert error.abs().max() < 2**-15

    monkeypatch.setattr(Explicit, "before_rope", keep)
    errors = attention_error("Qwen3", "eager", decode=False)
    monkeypatch.setattr(Explicit, "_key_scale", lambda mechanism, state: exact[mechanism])
    assert errors < 1.01 * attention_error("Qwen3", "eager", decode=False)


@torch.no_grad()
def test_in_place_weight_changes_take_effect() -> None:
    """Defect: weights folded for evaluation were not updated."""
    model = mixed_model("Llama", {"knocking": {"form": "linear"}}, "sdpa").eval()
    before = model(tokens()).logits
    for layer in model.model.layers:
        layer.self_attn.mixers["knocking"].value.weight.data.mul_(2)
    after = model(tokens()).logits
    eager = mixed_model("Llama", {"knocking": {"form": "linear"}}, "eager").eval()
    eager.load_state_dict(model.state_dict())
    assert (after - before).abs().max() > 1e-3
    torch.testing.assert_close(after, eager(tokens()).logits, rtol=1e-4, atol=1e-5)


@pytest.fixture
def registered_sdpa_calls() -> Iterator[list[int]]:
    """Replaces "sdpa" by a user's function; yields the number of queries of each of its calls."""
    query_counts: list[int] = []

    def attend(module: Any, query: torch.Tensor, *rest: Any, **options: Any) -> Any:
        query_counts.append(query.shape[2])
        return sdpa_attention_forward(module, query, *rest, **options)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attend
    yield query_counts
    del ALL_ATTENTION_FUNCTIONS["sdpa"]


@torch.no_grad()
def test_registered_sdpa_function_is_called_or_refused(registered_sdpa_calls: list[int]) -> None:
    """Defect: talking and explicit decoding ignored a registered function (e.g. of context parallelism)."""
    for case in ("explicit", "mixture", "knocking", "gating", "differential"):
        registered_sdpa_calls.clear()
        decoded_logits(mixed_model("Llama", CASES[case], "sdpa"), tokens(1, 6), 5)
        assert set(registered_sdpa_calls) == {5, 1}
    with pytest.raises(ValueError, match="'sdpa', 'eager' or 'crosshead_talking'"):
        mixed_model("Llama", CASES["talking"], "sdpa")(tokens())


def release_after_each_call(model: nn.Module) -> None:
    """Provide the weights of mechanisms only during calls of their own module, like ZeRO-3."""

    def fill(module: nn.Module, arguments: Any) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = weights[parameter]

    def empty(module: nn.Module, arguments: Any, output: Any) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.new_empty(0)

    weights = {
        parameter: parameter.data.clone()
        for module in model.modules()
        if isinstance(module, ParameterModule)
        for parameter in module.parameters(recurse=False)
    }
    for module in model.modules():
        if isinstance(module, ParameterModule):
            module.register_forward_pre_hook(fill)
            module.register_forward_hook(empty)
            empty(module, None, None)


@pytest.mark.parametrize("implementation", ("sdpa", "eager"))
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_decoding_works_when_weights_are_released_after_each_call(case: str, implementation: str) -> None:
    """Defect: modules returned their raw parameters, which ZeRO-3 releases after the call."""
    model = mixed_model("Llama", CASES[case], implementation)
    expected = decoded_logits(model, tokens(2, 8), 6)
    release_after_each_call(model)
    torch.testing.assert_close(decoded_logits(model, tokens(2, 8), 6), expected)


def test_private_torch_operators_are_used_only_in_kernels() -> None:
    """Defect: private operators were resolved at import. Only `kernels` may use them, with a fallback."""
    private = re.compile(r"torch\.ops\.aten\._|torch\._[a-z]|torch\.functional\._")
    files = [path for path in MODELING.rglob("*.py") if "kernels" not in path.parts]
    assert len(files) > 20
    assert not [path.name for path in files if private.search(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(("start", "limit"), (("identity", 0.003), ("random", 0.005)))
def test_bfloat16_gradients_of_knocking_are_accurate(start: str, limit: float) -> None:
    """Defect: gradients of the fused MLP were summed over blocks in bfloat16: 0.83% error with identity, now 0.2%."""
    torch.manual_seed(0)
    layout = HeadLayout(64, 8, 8, 64, value_dim=64, output_heads=8, key_components=8, value_components=8)
    knocking = Knocking(layout, {"form": "mlp", "on": ["value"], "init": start}).value
    for module in (knocking.up, knocking.gate, knocking.down):
        module.initialise(0.125)
    x, direction = torch.randn(2, 1, 4096, 8, 64).bfloat16()
    gradients: dict[torch.dtype, list[torch.Tensor]] = {}
    for dtype in (torch.bfloat16, torch.float64):
        module = knocking.bfloat16().to(dtype)
        module.zero_grad()
        (module(x.to(dtype)) * direction.to(dtype)).sum().backward()
        gradients[dtype] = [parameter.grad.double() for parameter in module.parameters()]
    for ours, exact in zip(*gradients.values(), strict=True):
        assert (ours - exact).norm() / exact.norm() < limit


@pytest.mark.parametrize("case", [case for case in MECHANISM_CASES if case != "talking"])
def test_second_derivatives_are_computed(case: str) -> None:
    """Defect: second derivatives failed for the MLP of knocking and for norms."""
    layer = Layer("Llama", MECHANISM_CASES[case], padding=(0, 0))
    options = {"position_embeddings": (layer.cos, layer.sin), "attention_mask": additive(layer.allowed)}
    weights = dict(layer.attention.named_parameters())
    generator = torch.Generator().manual_seed(0)
    direction = [torch.randn(weight.shape, generator=generator, dtype=weight.dtype) for weight in weights.values()]

    def gradients(step: float, create_graph: bool = False) -> tuple[torch.Tensor, ...]:
        """Return the first derivatives where each weight is moved by `step` times its direction."""
        moved = {name: weight + step * part for (name, weight), part in zip(weights.items(), direction, strict=True)}
        output, _ = functional_call(layer.attention, moved, (layer.inputs,), options)
        return torch.autograd.grad(output.pow(2).sum(), list(moved.values()), create_graph=create_graph)

    products = torch.autograd.grad(gradients(0.0, create_graph=True), list(weights.values()), direction)
    step = 3e-7
    for name, ours, after, before in zip(weights, products, gradients(step), gradients(-step), strict=True):
        assert (ours - (after - before) / (2 * step)).norm() < 1e-6 * (1 + ours.norm()), name
        # The unit gate of the only selected head does not depend on its routing probability.
        assert (ours.norm() > 1e-3) == (name != "mixers.mixture.routed.weight"), name


def test_no_global_optimizer_hooks_are_registered() -> None:
    optimizer = import_module("torch.optim.optimizer")
    assert not optimizer._global_optimizer_post_hooks
    assert not optimizer._global_optimizer_pre_hooks


def test_truncated_model_error_names_layer_counts() -> None:
    """Defect: the error came from `zip` and did not name the layer counts."""
    model = mixed_model("Llama", CASES["mixture"])
    model.model.layers = model.model.layers[:1]
    with pytest.raises(ValueError, match=r"\b1\b.*\b2\b"):
        model(tokens(), labels=tokens())
    model.config.num_hidden_layers = 1
    assert model(tokens(), labels=tokens()).balance_loss.isfinite()


def test_warning_names_config_field_with_access_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Defect: fields with a token were dropped without a warning."""
    from transformers.utils import logging

    logging.enable_propagation()
    config = mixed_config("Llama", {"knocking": {}})
    config.id2label = {0: "plain", 1: "hf_" + "a" * 30}
    config.save_pretrained(tmp_path)
    logging.disable_propagation()
    assert "id2label.1" in caplog.text
    saved = crosshead.CrossheadLlamaConfig.from_pretrained(tmp_path)
    assert saved.mixers == config.mixers and saved.id2label == {0: "plain"}
    assert "hf_a" not in (tmp_path / "config.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("half_values", [False, True])
@torch.no_grad()
def test_past_of_another_model_is_refused(half_values: bool) -> None:
    """A stock model's cache has other key sizes than `explicit`, and other value sizes than `half_values`."""
    mixers = {"differential": {"half_values": True, "norm": False}} if half_values else {"explicit": {"key_heads": 1}}
    stock, model = mixed_model("Llama", {}), mixed_model("Llama", mixers)
    past = stock(tokens(), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="the past is of another model"):
        model(tokens(), past_key_values=past)


@pytest.mark.parametrize("case", MECHANISM_CASES)
def test_models_on_the_meta_device_return_shapes(case: str) -> None:
    for implementation in ("sdpa", "eager"):
        model = mixed_model("Qwen3", CASES[case], implementation).to("meta")
        logits = model(torch.ones(2, 9, dtype=torch.long, device="meta")).logits
        assert logits.is_meta and logits.shape == (2, 9, model.config.vocab_size)
