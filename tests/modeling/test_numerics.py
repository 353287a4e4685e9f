"""Dtypes, initial values, dropout and windows, which the comparisons with the oracles do not cover."""

from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

import crosshead
from crosshead.modeling.model import share_of_batch
from tiers import grid
from toys import CASES, mixed_config, mixed_model, tokens

CAN_DROP = [case for case in CASES if "differential" not in case]


def record_attention_options(model: Any) -> list[dict[str, Any]]:
    """Wrap a model's sdpa attention; return the list to which the options of each call are appended."""
    calls: list[dict[str, Any]] = []

    def spy(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
        calls.append(options)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    AttentionInterface.register("numerics_spy", spy)
    AttentionMaskInterface.register("numerics_spy", eager_mask)
    model.config._attn_implementation = "numerics_spy"
    return calls


@pytest.mark.parametrize("case", [case for case in CASES if "talking" not in case])
def test_backend_receives_window_and_scaling(case: str) -> None:
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    model = mixed_model("Qwen3", CASES[case], backend=None, **window)
    recorded = record_attention_options(model)
    model(tokens())
    calls = len(recorded) // 2  # differential calls twice
    assert [options["sliding_window"] for options in recorded] == [None] * calls + [4] * calls
    assert {options["scaling"] for options in recorded} == {8**-0.5}


@pytest.mark.parametrize("case", [case for case in CAN_DROP if "talking" not in case])
def test_backend_receives_dropout_in_training_only(case: str) -> None:
    model = mixed_model("Qwen3", CASES[case], backend=None, attention_dropout=0.25)
    recorded = record_attention_options(model)
    model.train()(tokens())
    model.eval()(tokens())
    assert [options["dropout"] for options in recorded] == [0.25, 0.25, 0.0, 0.0]


@pytest.mark.parametrize("case", CAN_DROP)
def test_eager_attention_applies_dropout_to_weights(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[Any] = []
    real = functional.dropout

    def watch(x: torch.Tensor, p: float = 0.5, training: bool = True, **options: Any) -> torch.Tensor:
        dropped.append((tuple(x.shape), p, training))
        return real(x, p=p, training=training, **options)

    model = mixed_model("Llama", CASES[case], attention_dropout=0.25)
    monkeypatch.setattr(functional, "dropout", watch)
    trained = model.train()(tokens()).logits
    assert dropped == [((2, 4, 9, 9), 0.25, True)] * 2
    assert (trained - model.eval()(tokens()).logits).abs().max() > 1e-3
    assert {training for _, _, training in dropped[2:]} == {False}


@pytest.mark.parametrize(("case", "dtype"), grid(CASES, (torch.bfloat16, torch.float16, torch.float64), strength=1))
def test_softmax_runs_in_at_least_float32(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    dtypes: list[torch.dtype] = []
    real = functional.softmax

    def watch(x: torch.Tensor, dim: int | None = None, dtype: torch.dtype | None = None, **options: Any) -> Any:
        dtypes.append(dtype or x.dtype)
        return real(x, dim=dim, dtype=dtype, **options)

    model = mixed_model("Llama", CASES[case]).to(dtype)
    monkeypatch.setattr(functional, "softmax", watch)
    scores = model(tokens(), labels=tokens(), output_head_router_scores=True).head_router_scores
    assert set(dtypes) == {wide}
    assert scores is None or {score.dtype for score in scores} == {wide}


@pytest.mark.parametrize("case", [case for case in CASES if "talking" in case])
def test_talking_head_maps_stay_float32_under_autocast(case: str) -> None:
    model = mixed_model("Llama", CASES[case])
    dtypes: list[torch.dtype] = []
    for layer in model.model.layers:
        for stage in ("logits", "weights"):
            getattr(layer.self_attn.mixers["talking"], stage).register_forward_hook(
                lambda module, inputs, output: dtypes.append(output.dtype)
            )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(tokens()).logits.dtype == torch.bfloat16
    assert dtypes == [torch.float32] * 4


@pytest.mark.parametrize(("case", "backbone"), grid(CASES, ("Llama", "Qwen3", "Qwen3Moe"), strength=1))
def test_autocast_trains_and_generates(case: str, backbone: str) -> None:
    model = mixed_model(backbone, CASES[case])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model.train()(tokens(), labels=tokens())
        generated = model.eval().generate(tokens(), max_new_tokens=3, do_sample=False, pad_token_id=0)
    out.loss.backward()
    assert out.loss.dtype == torch.float32 and generated.shape == (2, 12)
    assert out.balance_loss is None or out.balance_loss.dtype == torch.float32
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def initial_parameters(mixers: dict[str, Any], **sizes: Any) -> dict[str, torch.Tensor]:
    """Return the initial mechanism parameters of one layer in a new model."""
    model = crosshead.CrossheadLlamaForCausalLM(mixed_config("Llama", mixers, num_hidden_layers=1, **sizes))
    return dict(model.model.layers[0].self_attn.mixers.named_parameters())


def test_initial_values_follow_papers() -> None:
    """Checks the standard deviations of random parameters, and identities, copies and zeros elsewhere."""
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32}
    knocking = initial_parameters({"knocking": {"form": "linear", "init": "random"}}, **sizes)["knocking.value.weight"]
    assert knocking.std().item() == pytest.approx(0.2, rel=0.1)  # the toys' initializer_range
    dynamic = ["query_logits", "key_logits", "query_weights", "key_weights"]
    talking = initial_parameters({"talking": {"softmax_heads": 12, "dynamic": dynamic}}, **sizes)
    for name in dynamic:
        mapped_from = 8 if name.endswith("logits") else 12
        expected = 0.1 / (256 * mapped_from) ** 0.5
        assert talking[f"talking.{name}.weight"].std().item() == pytest.approx(expected, rel=0.1)
    rows = talking["talking.logits.weight"]
    assert min((rows[i] - rows[j]).abs().max() for i in range(12) for j in range(i)) > 1e-3  # no two alike
    mlp = initial_parameters({"knocking": {}}, **sizes)
    assert torch.equal(mlp["knocking.value.up.weight"], torch.eye(32))
    assert torch.equal(mlp["knocking.value.down.weight"], torch.eye(32))
    assert not mlp["knocking.value.gate.weight"].any()
    explicit = initial_parameters({"explicit": {"key_heads": 4}}, **sizes)
    assert torch.equal(explicit["explicit.key.weight"], torch.eye(4).repeat_interleave(2, dim=0))
    assert torch.equal(explicit["explicit.value.weight"], torch.eye(8))
    assert torch.equal(explicit["explicit.norm.weight"], torch.ones(32))
    grouped = initial_parameters({"explicit": {"key_heads": 4, "groups": 2}}, **sizes)
    assert torch.equal(grouped["explicit.key.weight"], torch.eye(2).repeat_interleave(2, dim=0).repeat(2, 1))
    assert torch.equal(grouped["explicit.value.weight"], torch.eye(4).repeat(2, 1))
    for weight in initial_parameters({"differential": {}}, **sizes).values():
        assert weight.std().item() == pytest.approx(0.1, rel=0.4)


def test_share_of_batch_counts_predicted_tokens() -> None:
    labels = torch.tensor([[5, 6, 7, -100], [-100, 6, 7, 8]])
    assert share_of_batch(labels, {}) == 1.0
    assert share_of_batch(labels, {"num_items_in_batch": torch.tensor(10)}) == 5 / 10
    shifted = torch.tensor([[6, 7, -100, -100], [6, 7, -100, -100]])
    assert share_of_batch(labels, {"num_items_in_batch": 10, "shift_labels": shifted}) == pytest.approx(4 / 10)
