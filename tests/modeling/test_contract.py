"""Properties that every mechanism must have on every backbone."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from safetensors.torch import load_file, save_file

import crosshead
from case_grids import (
    for_each_case_and_backbone,
    for_each_case_and_decoder,
    for_each_case_and_model,
    for_each_mechanism_on_each_decoder,
    for_each_mechanism_on_each_model,
)
from crosshead.modeling.attention import CrossheadAttention
from tiers import grid
from toys import (
    BACKBONES,
    CASES,
    ENCODERS,
    NEUTRAL,
    SHARED_ROTARY,
    SHARED_ROTARY_CASES,
    lopsided,
    mixed_config,
    mixed_model,
    mixers_of,
    model_class,
    stock_model,
    tokens,
)

REMOTE_CODE_WORKER = Path(__file__).with_name("remote_code_worker.py")
HALVES = (torch.bfloat16, torch.float16)
BACKENDS = ("eager", "sdpa")
"""Attention backends that run every case, without an accelerator or a compiler."""
NEUTRAL_STARTS = [
    pytest.param(name, index, backbone, marks=[] if index == number % len(cases) else [pytest.mark.slow])
    for name, cases in NEUTRAL.items()
    for index in range(len(cases))
    for number, backbone in enumerate((*BACKBONES, *ENCODERS))
]
"""Default tier: each mechanism on each backbone, each configuration on some backbone."""
on_every_backbone = pytest.mark.parametrize("backbone", BACKBONES)


def ours_from_stock(backbone: str, folder: Path, mixers: dict[str, Any], backend: str = "eager") -> Any:
    """Load a stock checkpoint with the crosshead class of a backbone."""
    return model_class(backbone).from_pretrained(folder, mixers=mixers, attn_implementation=backend).eval()


@pytest.mark.oldest
@pytest.mark.parametrize(("mechanism", "index", "backbone"), NEUTRAL_STARTS)
@torch.no_grad()
def test_neutral_start_is_the_stock_model(mechanism: str, index: int, backbone: str, tmp_path: Path) -> None:
    stock = stock_model(backbone)
    stock.save_pretrained(tmp_path)
    ours = ours_from_stock(backbone, tmp_path, NEUTRAL[mechanism][index])
    expected = stock(tokens()).logits
    difference = (ours(tokens()).logits - expected).abs().max()
    # With QK norm, explicit divides by the norm after the combination, which adds one rounding.
    added_arithmetic = mechanism == "explicit" and backbone.startswith("Qwen3")
    assert difference <= (1e-6 * expected.abs().max() if added_arithmetic else 0)


@pytest.mark.parametrize("backbone", (*BACKBONES, *ENCODERS))
@torch.no_grad()
def test_model_without_mixers_equals_stock_model(backbone: str, tmp_path: Path) -> None:
    stock = stock_model(backbone, backend="sdpa")
    stock.save_pretrained(tmp_path)
    ours = ours_from_stock(backbone, tmp_path, {}, backend="sdpa")
    assert not any(isinstance(module, CrossheadAttention) for module in ours.modules())
    assert torch.equal(ours(tokens()).logits, stock(tokens()).logits)


@for_each_case_and_model
@torch.no_grad()
def test_trained_weights_survive_save_and_load(case: str, backbone: str, tmp_path: Path) -> None:
    model = mixed_model(backbone, mixers_of(case, backbone))
    model.save_pretrained(tmp_path / "first")
    again = type(model).from_pretrained(tmp_path / "first", attn_implementation="eager").eval()
    again.save_pretrained(tmp_path / "second")
    third = type(model).from_pretrained(tmp_path / "second", attn_implementation="eager")
    for reloaded in (again, third.eval()):
        assert list(reloaded.config.mixers) == list(mixers_of(case, backbone))
        assert torch.equal(reloaded(tokens()).logits, model(tokens()).logits)


@pytest.mark.oldest
@for_each_mechanism_on_each_model
@torch.no_grad()
def test_remote_code_gives_the_same_logits(case: str, backbone: str, warm_process: Any, tmp_path: Path) -> None:
    model, environment = mixed_model(backbone, mixers_of(case, backbone)), os.environ | {"HF_HUB_OFFLINE": "1"}
    model.save_pretrained(tmp_path / "model")
    save_file({"ids": tokens()}, tmp_path / "inputs.safetensors")
    command = [sys.executable, "-P", str(REMOTE_CODE_WORKER), str(tmp_path)]
    done = warm_process.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert torch.equal(load_file(tmp_path / "outputs.safetensors")["logits"], model(tokens()).logits)


@for_each_case_and_model
def test_stock_checkpoint_loads_without_uninitialised_parameters(case: str, backbone: str, tmp_path: Path) -> None:
    keeps_shapes = {
        name: {
            option: value
            for option, value in options.items()
            if not option.endswith(("key_heads", "value_heads", "half_values", "version"))
        }
        for name, options in mixers_of(case, backbone).items()
        if name != "bilinear"  # its projections have other shapes
    }
    stock_model(backbone).save_pretrained(tmp_path)
    torch.use_deterministic_algorithms(True)  # uninitialised memory is filled with NaN
    try:
        model = ours_from_stock(backbone, tmp_path, keeps_shapes)
        fresh = model_class(backbone)(mixed_config(backbone, keeps_shapes))
    finally:
        torch.use_deterministic_algorithms(False)
    for candidate in (model, fresh):
        for name, parameter in candidate.named_parameters():
            assert parameter.isfinite().all(), name
    starts = dict(fresh.named_parameters())
    for name, parameter in model.named_parameters():
        if ".mixers." in name:
            assert abs(parameter.mean() - starts[name].mean()) < 0.3, name
            assert parameter.abs().max() < 2, name


def test_partially_loaded_mechanism_keeps_loaded_tensors(tmp_path: Path) -> None:
    model = mixed_model("Llama", {"differential": {}})
    model.save_pretrained(tmp_path)
    dropped = "model.layers.0.self_attn.mixers.differential.lambda_k2"
    weights = load_file(tmp_path / "model.safetensors")
    del weights[dropped]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    half, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["missing_keys"]) == {dropped}
    for name, parameter in half.state_dict().items():
        if name == dropped:
            assert 0 < parameter.abs().max() < 1
        else:
            assert torch.equal(parameter, weights[name]), name


@for_each_mechanism_on_each_model
def test_every_new_parameter_gets_a_gradient(case: str, backbone: str) -> None:
    trained = mixed_model(backbone, mixers_of(case, backbone))
    fresh = type(trained)(mixed_config(backbone, mixers_of(case, backbone)))
    for model in (trained, fresh):
        model.train()
        model(tokens(), labels=tokens()).loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            if ".mixers." in name:
                assert parameter.grad.abs().max() > 0, name


@for_each_case_and_decoder
@torch.no_grad()
def test_attention_is_causal(case: str, backbone: str) -> None:
    for backend in BACKENDS:
        model = mixed_model(backbone, mixers_of(case, backbone), backend=backend)
        ids, changed = tokens(), tokens()
        changed[:, 5:] = tokens(seed=2)[:, 5:]
        difference = (model(ids).logits - model(changed).logits).abs().amax(dim=(0, 2))
        assert difference[:5].max() < 1e-5
        assert difference[5:].min() > 1e-3


@for_each_mechanism_on_each_decoder
@torch.no_grad()
def test_left_padded_cached_decoding_equals_the_full_forward(case: str, backbone: str) -> None:
    for backend in BACKENDS:
        model = mixed_model(backbone, mixers_of(case, backbone), backend=backend)
        long, short = tokens(1, 9), tokens(1, 6, seed=3)
        ids = torch.cat([long, torch.cat([torch.zeros(1, 3, dtype=torch.long), short], dim=1)])
        mask = (ids != 0).long()
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        cache, steps = None, []
        for start, stop in ((0, 5), (5, 6), (6, 7), (7, 9)):
            out = model(
                ids[:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=positions[:, start:stop],
                past_key_values=cache,
                use_cache=True,
            )
            cache = out.past_key_values
            steps.append(out.logits)
        decoded = torch.cat(steps, dim=1)
        assert (decoded[:1] - model(long).logits).abs().max() < 1e-4
        assert (decoded[1:, 3:] - model(short).logits).abs().max() < 1e-4


@for_each_case_and_decoder
@torch.no_grad()
def test_packed_sequences_equal_separate_ones(case: str, backbone: str) -> None:
    first, second = tokens(1, 5), tokens(1, 7, seed=4)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    for backend in BACKENDS:
        model = mixed_model(backbone, mixers_of(case, backbone), backend=backend)
        packed = model(torch.cat([first, second], dim=1), position_ids=positions, use_cache=False).logits
        separate = torch.cat([model(first).logits, model(second).logits], dim=1)
        assert (packed - separate).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("case", "backbone", "dtype"),
    [*grid(CASES, BACKBONES, HALVES, strength=1), *grid(SHARED_ROTARY_CASES, SHARED_ROTARY, HALVES, strength=1)],
)
def test_half_precision_logits_are_close_to_float32(case: str, backbone: str, dtype: torch.dtype) -> None:
    model = mixed_model(backbone, mixers_of(case, backbone))
    expected = model(tokens()).logits
    half = model.to(dtype).train()
    out = half(tokens(), labels=tokens())
    assert out.logits.dtype == dtype
    agreement = torch.nn.functional.cosine_similarity(out.logits.float(), expected, dim=-1)
    assert agreement.median() > 0.98
    out.loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in half.parameters())


@for_each_case_and_model
@torch.no_grad()
def test_offloaded_model_gives_the_same_logits(case: str, backbone: str) -> None:
    """accelerate loads a module's weights when the module is called, so parameters must not be read elsewhere."""
    model = mixed_model(backbone, mixers_of(case, backbone))
    expected = model(tokens()).logits
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(model(tokens()).logits, expected)


@pytest.mark.parametrize(("case", "dtype"), grid(CASES, (torch.float32, torch.bfloat16, torch.float16), strength=1))
def test_fully_padded_rows_stay_finite(case: str, dtype: torch.dtype) -> None:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1] = 0
    for backend in BACKENDS:
        model = mixed_model("Qwen3", CASES[case], backend=backend).to(dtype).train()
        labels = tokens().masked_fill(mask == 0, -100)
        out = model(tokens(), attention_mask=mask, labels=labels)
        assert out.logits.isfinite().all()
        out.loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@for_each_case_and_backbone
@torch.no_grad()
def test_sequence_classification_survives_save_and_load(case: str, backbone: str, tmp_path: Path) -> None:
    from transformers import AutoModel, AutoModelForSequenceClassification

    config = mixed_config(backbone, CASES[case], num_labels=3)
    model = lopsided(AutoModelForSequenceClassification.from_config(config)).eval()
    assert type(model) is getattr(crosshead, f"Crosshead{backbone}ForSequenceClassification")
    model.save_pretrained(tmp_path)
    logits = model(tokens(), labels=torch.tensor([0, 2])).logits
    assert logits.shape == (2, 3)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(again(tokens()).logits, logits)
    backbone_alone = AutoModel.from_pretrained(tmp_path).eval()
    assert type(backbone_alone) is getattr(crosshead, f"Crosshead{backbone}Model")
    assert torch.equal(backbone_alone(tokens()).last_hidden_state, model.model(tokens()).last_hidden_state)
