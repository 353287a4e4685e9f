"""Attention backends: supported ones agree with eager and apply the mask, unsupported ones are refused."""

import shutil
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

import crosshead
from case_grids import for_each_case_and_backbone, for_each_mechanism_on_each_backbone
from tiers import first, grid
from toys import CASES, IMAGE_SIZES, STOCK, mixed_config, mixed_model, tokens
from transnext_toys import SIZES as TRANSNEXT_SIZES

NEEDS_WEIGHTS = [case for case in CASES if "talking" in case]
OWN = [f"crosshead_{name}" for name in ("talking", "talking_eager", "differential", "mixture", "explicit")]
DISPATCHED = [case for case in CASES if "talking" not in case]
PADDED = torch.tensor([[1] * 9, [0] * 3 + [1] * 6])


@torch.no_grad()
def real_token_logits(model: Any) -> torch.Tensor:
    """Return the logits of the real tokens of a padded batch."""
    return model(tokens(), attention_mask=PADDED).logits[PADDED.bool()]


@for_each_mechanism_on_each_backbone
def test_sdpa_agrees_with_eager(case: str, backbone: str) -> None:
    eager, sdpa = (mixed_model(backbone, CASES[case], backend=backend) for backend in ("eager", "sdpa"))
    assert (real_token_logits(eager) - real_token_logits(sdpa)).abs().max() < 1e-4
    default = mixed_model(backbone, CASES[case], backend=None)
    assert default.config._attn_implementation == "sdpa"
    assert torch.equal(real_token_logits(default), real_token_logits(sdpa))


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.skipif(shutil.which("g++") is None, reason="flex attention on a CPU compiles C++ and finds no g++")
@pytest.mark.parametrize("case", DISPATCHED)
def test_flex_attention_agrees_with_eager(case: str) -> None:
    sizes = {"hidden_size": 32, "head_dim": 16}  # flex attention needs head sizes of at least 16
    eager, flex = (mixed_model("Qwen3", CASES[case], backend=b, **sizes) for b in ("eager", "flex_attention"))
    assert (real_token_logits(eager) - real_token_logits(flex)).abs().max() < 1e-4


@pytest.mark.parametrize(("case", "backend"), grid(NEEDS_WEIGHTS, ("flash_attention_2", "flex_attention"), strength=1))
def test_talking_refuses_flash_and_flex_attention(case: str, backend: str, tmp_path: Any) -> None:
    expected = f"attn_implementation='{backend}'.*'talking'"
    with pytest.raises(ValueError, match=expected):
        AutoModelForCausalLM.from_config(mixed_config("Llama", CASES[case]), attn_implementation=backend)
    model = mixed_model("Llama", CASES[case])
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=expected):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=backend)
    with pytest.raises(ValueError, match=expected):
        model.set_attn_implementation(backend)


@pytest.mark.parametrize(
    "backend",
    [
        "flash_attention_2",
        # Compiles its mask before attention is called, which takes 20 s and needs g++.
        pytest.param("flex_attention", marks=[pytest.mark.slow, pytest.mark.compile]),
    ],
)
def test_backend_assigned_to_config_is_refused_in_forward(backend: str) -> None:
    model = mixed_model("Llama", CASES[NEEDS_WEIGHTS[0]])
    model.config._attn_implementation = backend
    with pytest.raises(ValueError, match=f"attn_implementation='{backend}'.*'talking'"):
        model(tokens())


@pytest.mark.parametrize("case", ["knocking", *NEEDS_WEIGHTS])
def test_unknown_backend_raises_transformers_error(case: str) -> None:
    model = mixed_model("Llama", CASES[case])
    with pytest.raises(ValueError, match='attn_implementation="foo"'):
        model.set_attn_implementation("foo")
    assert model.config._attn_implementation == "eager"


def test_knocking_does_not_refuse_flash_attention() -> None:
    with pytest.raises(ImportError, match=r"flash_attn|kernels|FlashAttention"):
        AutoModelForCausalLM.from_config(
            mixed_config("Llama", {"knocking": {}}), attn_implementation="flash_attention_2"
        )


def test_set_attn_implementation_switches_backend() -> None:
    model = mixed_model("Llama", CASES["explicit"])
    expected = real_token_logits(model)
    model.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == "sdpa"
    assert (real_token_logits(model) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_crosshead_backends_are_causal_without_mask(case: str, name: str) -> None:
    model = mixed_model("Llama", CASES[case])
    expected = model(tokens()).logits
    model.set_attn_implementation(name)
    assert (model(tokens()).logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("case", DISPATCHED)
def test_custom_backend_receives_stock_tensor_shapes(case: str) -> None:
    """A custom attention gets the arguments of stock models: all query and key/value heads, the window, a mask.

    With `differential` it gets half of the heads per call: the first or the second head of each pair.
    """
    shapes: list[Any] = []

    def spy(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        shapes.append((tuple(query.shape), tuple(key.shape), tuple(value.shape), kwargs["sliding_window"]))
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("spy", spy)
    AttentionMaskInterface.register("spy", eager_mask)
    model = mixed_model("Qwen3", CASES[case], backend="spy")
    assert (real_token_logits(model) - real_token_logits(mixed_model("Qwen3", CASES[case]))).abs().max() < 1e-4
    parts = 2 if "differential" in case else 1
    keys = (2, 2 // parts, 9, 8)
    assert set(shapes) == {((2, 4 // parts, 9, 8), keys, keys, None)}


@for_each_case_and_backbone
@torch.no_grad()
def test_eager_returns_attention_weights(case: str, backbone: str) -> None:
    model = mixed_model(backbone, CASES[case])
    weights = model(tokens(), output_attentions=True).attentions
    assert len(weights) == 2
    for layer in weights:
        assert layer.shape == (2, 4, 9, 9)
        assert layer.triu(1).abs().max() == 0  # no weight on future tokens
        if "talking" not in case:
            assert (layer.sum(-1) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("case", first(["differential", "talking", "knocking", "explicit", "mixture"], 2))
def test_returned_attention_weights_have_gradients(case: str) -> None:
    outputs = mixed_model("Llama", CASES[case])(tokens(), output_attentions=True)
    for weights in outputs.attentions:
        weights.retain_grad()
    outputs.logits.square().sum().backward()
    for weights in outputs.attentions:
        assert weights.grad is not None and weights.grad.abs().max() > 0


@pytest.mark.parametrize("case", [*NEEDS_WEIGHTS, "differential"])
def test_generate_batch_is_refused_with_talking_and_differential(case: str) -> None:
    model = mixed_model("Llama", CASES[case])
    with pytest.raises(ValueError, match=r"'(talking|differential)'.*generate\(\)"):
        model.generate_batch([[1, 2, 3]])


@pytest.mark.parametrize("case", first(["explicit", "gta", "knocking", "mixture", "knocking+mixture"], 2))
def test_continuous_batching_equals_generate(case: str) -> None:
    model = mixed_model("Gta" if case == "gta" else "Llama", CASES[case.replace("gta", "mixture")], backend="sdpa")
    settings = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=60, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=64)  # the default allocates most of the memory
    ids = tokens(1, 9)
    expected = model.generate(ids, generation_config=settings)[0, 9:].tolist()
    results = model.generate_batch([ids[0].tolist()], generation_config=settings, continuous_batching_config=small)
    assert next(iter(results.values())).generated_tokens == expected


OTHER_SIZES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("ViT", "DeiT", "Dinov2"), IMAGE_SIZES),
    "TransNext": TRANSNEXT_SIZES,
}


def test_auto_classes_build_models_of_every_family() -> None:
    for config_class, models in crosshead.FAMILIES.items():
        backbone = config_class.__name__[9:-6]
        sizes = mixed_config(backbone, {}).to_dict() if backbone in STOCK else OTHER_SIZES[backbone]
        auto_classes = [getattr(transformers, name) for name in config_class.auto_classes]
        made = [type(auto_class.from_config(config_class(**sizes))) for auto_class in auto_classes]
        assert made == [*models]
