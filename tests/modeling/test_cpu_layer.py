"""The CPU layer of encoders that skips projections of unselected heads: same outputs, and when it is not used."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import crosshead
from crosshead.modeling.kernels import cpu_mixture_layer
from toys import IMAGE_SIZES, lopsided, mixed_model, tokens

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))
HALF = {"active_heads": 2, "shared_heads": 1}


@pytest.fixture
def sparse_layer_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Enable the sparse layer for short sequences; yields the number of tokens of each of its calls."""
    token_counts: list[int] = []
    skip = cpu_mixture_layer.mixture_layer

    def noted(layer: Any, hidden: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        token_counts.append(hidden.shape[1])
        return skip(layer, hidden, gates)

    monkeypatch.setattr(cpu_mixture_layer, "mixture_layer", noted)
    monkeypatch.setattr(cpu_mixture_layer, "MIN_TOKENS", 2)
    yield token_counts


def classifier(mixture: dict[str, Any], backbone: str = "ViT", **changes: Any) -> Any:
    """Return a tiny image classifier in float64."""
    config_class = getattr(crosshead, f"Crosshead{backbone}Config")
    config = config_class(**IMAGE_SIZES, mixers={"mixture": mixture}, **changes)
    config._attn_implementation = "sdpa"
    return lopsided(getattr(crosshead, f"Crosshead{backbone}ForImageClassification")(config)).eval().double()


@pytest.mark.parametrize("backbone", ["ViT", "DeiT"])
@pytest.mark.parametrize(
    "options",
    [HALF, HALF | {"gate": "binary"}, {"active_heads": 2, "shared_heads": 0}, HALF | {"gate_scale": "paper"}],
    ids=str,
)
def test_sparse_layer_equals_plain_forward(
    options: dict[str, Any], backbone: str, sparse_layer_calls: list[int]
) -> None:
    model = classifier(options, backbone)
    plain = model(IMAGES.double(), output_head_router_scores=True)
    assert sparse_layer_calls == []  # not used with gradients
    with torch.inference_mode():
        outputs = model(IMAGES.double(), output_head_router_scores=True)
    assert len(sparse_layer_calls) == 2
    assert plain.logits.abs().max() > 0.1 and (outputs.logits - plain.logits).abs().max() < 1e-12
    for mine, theirs in zip(outputs.head_router_scores, plain.head_router_scores, strict=True):
        assert (mine - theirs).abs().max() < 1e-12


def test_albert_uses_sparse_layer_only_without_padding(sparse_layer_calls: list[int]) -> None:
    model = mixed_model("Albert", {"mixture": HALF}, "sdpa").double()
    plain = model(tokens()).logits
    with torch.no_grad():
        assert (model(tokens()).logits - plain).abs().max() < 1e-10 and len(sparse_layer_calls) == 2
        model(tokens(), attention_mask=torch.tensor([[1] * 9, [1] * 6 + [0] * 3]))
    assert len(sparse_layer_calls) == 2


def _train(model: Any) -> None:
    model.train()


def _hook(model: Any) -> None:
    for layer in model.base_model.layers:
        layer.attention.q_proj.register_forward_hook(lambda *_: None)


def _wrap(model: Any) -> None:
    class Wrapped(nn.Linear):
        """A wrapped projection, like those of adapters."""

    for layer in model.base_model.layers:
        layer.attention.o_proj.__class__ = Wrapped


def _eager(model: Any) -> None:
    model.set_attn_implementation("eager")


def _bfloat16(model: Any) -> None:
    model.bfloat16()


@pytest.mark.parametrize("change", [_train, _hook, _wrap, _eager, _bfloat16])
def test_ineligible_models_use_plain_forward(change: Callable[[Any], None], sparse_layer_calls: list[int]) -> None:
    model = classifier(HALF, attention_probs_dropout_prob=0.0)
    change(model)
    with torch.no_grad():
        assert model(IMAGES.to(model.dtype)).logits.isfinite().all()
    assert sparse_layer_calls == []


@pytest.mark.parametrize("options", [{"active_heads": 2, "router": "query_norm"}, {"active_heads": 3}])
def test_sparse_layer_is_unused_when_it_saves_nothing(options: dict[str, Any], sparse_layer_calls: list[int]) -> None:
    """Not used with the query_norm router, which reads all queries, nor with 3 of 4 heads, which saves nothing."""
    model = classifier(options)
    with torch.no_grad():
        outputs = model(IMAGES.double(), output_head_router_scores=True)
    assert sparse_layer_calls == [] and len(outputs.head_router_scores) == 2


@pytest.mark.compile
def test_compiled_model_uses_plain_forward(sparse_layer_calls: list[int]) -> None:
    """Compilation traces the plain forward, in one graph."""
    model = classifier(HALF)
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)(IMAGES.double()).logits
        assert sparse_layer_calls == []
        assert (compiled - model(IMAGES.double()).logits).abs().max() < 1e-12


def test_kernel_wraps_encoder_forward_once() -> None:
    """Kernels wrap the forward of the installed class only; published models have the plain forward."""
    attend = crosshead.modeling.encoder.EncoderAttention.forward
    assert attend.__wrapped__.__module__ == "crosshead.modeling.encoder"
    assert not hasattr(attend.__wrapped__, "__wrapped__")
