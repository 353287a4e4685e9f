"""DiT with mechanisms: compared with the oracle and the stock model, and in training."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

pytest.importorskip("diffusers")

from diffusers import DiTTransformer2DModel
from diffusers.training_utils import EMAModel

import dit_oracle
import oracle_routing
from crosshead.modeling.dit import ACCEPTED, CrossheadDiTTransformer2DModel
from dit_toys import LABELS, LATENTS, MIXTURE, SIZES, TIMES, our_dit, stock_dit
from oracle_layers import GRADIENT_TOLERANCE, OUTPUT_TOLERANCE
from toys import MECHANISM_CASES, NEUTRAL

CASES: dict[str, dict[str, Any]] = {
    "mixture": MIXTURE,
    "formula's gates": {"mixture": {"active_heads": 3, "shared_heads": 2, "gate_scale": "paper"}},
    "no shared heads": {"mixture": {"active_heads": 2, "shared_heads": 0}},
    "query norms": {"mixture": {"active_heads": 3, "shared_heads": 1, "router": "query_norm", "gate": "binary"}},
    "binary gates": {"mixture": {"active_heads": 3, "shared_heads": 2, "gate": "binary"}},
    "knocking": MECHANISM_CASES["knocking"],
    "gating": {"gating": {}},
    "all": {"knocking": {}, **MIXTURE, "gating": {}},
}
BUDGETS: dict[str, Any] = {"mixture": {"active_heads": [2, 3], "shared_heads": [0, 2], "gate_scale": "paper"}}
for_each_case = pytest.mark.parametrize("case", CASES)


def oracle_mixers(model: CrossheadDiTTransformer2DModel) -> list[dict[str, Any]]:
    """Return the complete mechanism options of each block."""
    return [model.mixers_of_layer(block) for block in range(SIZES["num_layers"])]


def denoising_loss(model: Any, rows: slice = slice(None)) -> torch.Tensor:
    """Return the training loss with fixed noise for some rows of LATENTS."""
    output = model(LATENTS[rows], TIMES[rows], LABELS[rows])
    noise = torch.randn(output.sample.shape, generator=torch.Generator().manual_seed(rows.start or 0))
    return functional.mse_loss(output.sample, noise.to(output.sample)) + output.auxiliary_loss


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Return a copy of all gradients by name, and clear them in the model."""
    grads = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    return grads


@for_each_case
def test_block_follows_the_oracle(case: str) -> None:
    model = our_dit(CASES[case]).double()
    block, weights = model.transformer_blocks[1], dict(model.transformer_blocks[1].named_parameters())
    inputs = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    inputs.requires_grad_()
    ours = block(inputs, timestep=TIMES, class_labels=LABELS)
    mixers, heads = oracle_mixers(model)[1], SIZES["num_attention_heads"]
    truth = torch.stack(
        [dit_oracle.block(inputs[b], int(TIMES[b]), int(LABELS[b]), weights, heads, mixers, 1e-5)[0] for b in range(2)]
    )
    assert truth.abs().max() > 0.1
    assert (ours - truth).abs().max() < OUTPUT_TOLERANCE
    direction = torch.randn(truth.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    named = {"inputs": inputs, **weights}
    results = [torch.autograd.grad((output * direction).sum(), list(named.values())) for output in (ours, truth)]
    for name, one, other in zip(named, *results, strict=True):
        assert (one - other).abs().max() < GRADIENT_TOLERANCE, name


@pytest.mark.parametrize("mixers", [BUDGETS, CASES["all"], {}], ids=["budgets", "all", "none"])
@torch.no_grad()
def test_model_follows_the_oracle(mixers: dict[str, Any]) -> None:
    model = our_dit(mixers).double()
    output = model(LATENTS.double(), TIMES, LABELS, output_head_router_scores=True)
    weights, routing = dict(model.named_parameters()), []
    for row in range(2):
        image, time, label = LATENTS[row].double(), int(TIMES[row]), int(LABELS[row])
        truth, block_routing = dit_oracle.model(image, time, label, weights, model.config, oracle_mixers(model))
        assert truth.abs().max() > 0.1
        assert (output.sample[row] - truth).abs().max() < OUTPUT_TOLERANCE
        routing.append(block_routing)
    if mixers:
        for index, scores in enumerate(output.head_router_scores):
            truth = torch.stack([block_routing[index]["probabilities"] for block_routing in routing])
            assert (scores - truth).abs().max() < OUTPUT_TOLERANCE


def test_balance_loss_follows_the_oracle() -> None:
    model = our_dit(BUDGETS).double()
    output = model(LATENTS.double(), TIMES, LABELS)
    routing = [
        dit_oracle.model(
            LATENTS[row].double(),
            int(TIMES[row]),
            int(LABELS[row]),
            dict(model.named_parameters()),
            model.config,
            oracle_mixers(model),
        )[1]
        for row in range(2)
    ]
    names, blocks = ("probabilities", "selected"), range(SIZES["num_layers"])
    layers = [tuple(torch.stack([sample[i][name] for sample in routing]) for name in names) for i in blocks]
    truth = oracle_routing.balance_loss(layers, torch.ones(2, 9))
    assert (output.balance_loss - truth).abs() < OUTPUT_TOLERANCE
    assert torch.allclose(output.auxiliary_loss, 0.01 * output.balance_loss)


@pytest.mark.oldest
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@torch.no_grad()
def test_neutral_start_is_the_stock_model(dtype: torch.dtype) -> None:
    """Uses a head size whose square root is no power of two, so that rounding of the scaling would be visible."""
    stock = stock_dit(attention_head_dim=12).to(dtype)
    for name in ACCEPTED:
        for mixers in [{}, *NEUTRAL[name]]:
            ours = CrossheadDiTTransformer2DModel.from_transformer(stock, mixers)
            assert (ours.dtype, ours.training) == (dtype, False)
            arguments = (LATENTS.to(dtype), TIMES, LABELS)
            assert torch.equal(ours(*arguments).sample, stock(*arguments).sample), mixers


def test_same_seed_gives_the_stock_weights() -> None:
    torch.manual_seed(4)
    stock = DiTTransformer2DModel(**SIZES).state_dict()
    torch.manual_seed(4)
    ours = CrossheadDiTTransformer2DModel(**SIZES, mixers=MIXTURE).state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in stock.items())


@for_each_case
def test_every_new_parameter_gets_a_gradient(case: str) -> None:
    model = our_dit(CASES[case]).train()
    denoising_loss(model).backward()
    grads = gradients(model)
    new = [name for name, _ in model.named_parameters() if ".mixers." in name]
    assert new or CASES[case]["mixture"]["router"] == "query_norm"
    without_gradient = [name for name in new if grads[name].abs().max() == 0]
    assert without_gradient == []


@pytest.mark.parametrize("case", ["mixture", "query norms"])
def test_checkpointing_keeps_gradients_and_refuses_reentrant(case: str) -> None:
    model = our_dit(CASES[case])
    denoising_loss(model).backward()
    plain = gradients(model)
    model.enable_gradient_checkpointing()
    denoising_loss(model).backward()
    assert all(torch.equal(gradient, plain[name]) for name, gradient in gradients(model).items())
    model.enable_gradient_checkpointing(partial(checkpoint, use_reentrant=True))
    with pytest.raises(ValueError, match="use_reentrant=True"):
        denoising_loss(model)


def test_accumulated_gradients_equal_mean_of_single_calls() -> None:
    """Each call has its own balance loss; no router scores remain from the previous call."""
    model = our_dit(MIXTURE)
    halves = [slice(0, 1), slice(1, 2)]
    for rows in halves:
        (denoising_loss(model, rows) / 2).backward()
    accumulated = gradients(model)
    alone = []
    for rows in halves:
        fresh = our_dit(MIXTURE)
        denoising_loss(fresh, rows).backward()
        alone.append(gradients(fresh))
    for name, gradient in accumulated.items():
        assert torch.allclose(gradient, (alone[0][name] + alone[1][name]) / 2, atol=1e-7), name
    with torch.no_grad():
        silent = model(LATENTS, TIMES, LABELS)
    assert silent.auxiliary_loss is silent.balance_loss is silent.head_router_scores is None
    assert len(model(LATENTS, TIMES, LABELS, return_dict=False)) == 1


def test_auxiliary_loss_is_zero_without_router() -> None:
    output = our_dit({"gating": {}})(LATENTS, TIMES, LABELS)
    assert output.auxiliary_loss == 0
    assert output.balance_loss is None


@torch.no_grad()
def test_half_precision_keeps_router_scores_in_float32() -> None:
    """The sample has at most twice the rounding error of the stock model, which is 1.4% here."""
    model = our_dit(MIXTURE)
    exact = model(LATENTS, TIMES, LABELS).sample
    with torch.autocast("cpu", torch.bfloat16):
        assert (model(LATENTS, TIMES, LABELS).sample - exact).abs().max() < 0.2 * exact.abs().max()
    half = model.bfloat16()(LATENTS.bfloat16(), TIMES, LABELS, output_head_router_scores=True)
    assert half.sample.dtype == torch.bfloat16
    assert {scores.dtype for scores in half.head_router_scores} == {torch.float32}
    stock = stock_dit().bfloat16()
    errors = []
    for rounded, sample in ((model, half.sample), (stock, stock(LATENTS.bfloat16(), TIMES, LABELS).sample)):
        exact = rounded.float()(LATENTS.bfloat16().float(), TIMES, LABELS).sample  # the same rounded weights
        errors.append((sample.float() - exact).norm() / exact.norm())
    assert 0 < errors[0] < 2 * errors[1]


@pytest.mark.slow
@pytest.mark.compile
def test_compiled_model_and_blocks_give_the_same_gradients() -> None:
    model = our_dit(MIXTURE)
    denoising_loss(model).backward()
    plain = gradients(model)
    by_blocks = copy.deepcopy(model)
    for block in by_blocks.transformer_blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    for compiled in (torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True), by_blocks):
        denoising_loss(compiled).backward()
        grads = {name.removeprefix("_orig_mod."): gradient for name, gradient in gradients(compiled).items()}
        assert all(torch.allclose(gradient, plain[name], atol=1e-6) for name, gradient in grads.items())
        assert grads.keys() == plain.keys()


def test_ema_weights_include_routers(tmp_path: Any) -> None:
    model = our_dit(MIXTURE)
    ema = EMAModel(model.parameters(), decay=0.5, model_cls=type(model), model_config=model.config)
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        ema.step(model.parameters())
    ema.save_pretrained(tmp_path)
    loaded = EMAModel.from_pretrained(tmp_path, type(model))
    averaged = dict(CrossheadDiTTransformer2DModel.from_pretrained(tmp_path).named_parameters())
    assert 0 < ema.cur_decay_value < 1
    for (name, parameter), shadow in zip(model.named_parameters(), loaded.shadow_params, strict=True):
        assert torch.equal(shadow, averaged[name])
        assert torch.allclose(averaged[name], parameter - ema.cur_decay_value, atol=1e-5), name
    assert loaded.optimization_step == 2
    assert sum(".mixers." in name for name in averaged) == 6
