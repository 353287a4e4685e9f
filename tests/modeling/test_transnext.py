"""TransNeXt: attention and whole models compared with the oracle, losses, training and precision."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import Trainer, TrainingArguments

import oracle_routing
import transnext_oracle
from crosshead import CrossheadTransNextConfig, CrossheadTransNextForImageClassification
from crosshead.modeling.backbones.transnext_attention import feature_map
from oracle_layers import GRADIENT_TOLERANCE, OUTPUT_TOLERANCE, gradients
from tiers import first, grid
from transnext_toys import CASES, CONSTANT, IMAGES, LABELS, ROUTED, SIZES, model_of


def attention_layers(model: Any) -> list[Any]:
    """Return the attention modules of all layers."""
    return [getattr(parent, name) for _, parent, name in model.base_model._attention_modules()]


@pytest.mark.parametrize(("case", "size"), grid(CASES, [(5, 6), (1, 3), (4, 4)], strength=1))
def test_attention_follows_the_oracle(case: str, size: tuple[int, int]) -> None:
    model = model_of(CASES[case]).double()
    config, modules = model.config, attention_layers(model)
    generator = torch.Generator().manual_seed(5)
    for layer in (0, 3, 4):
        stage, attention = config.stage_of_layer(layer), modules[layer]
        reduction, heads, pretrained = config.sr_ratios[stage], config.num_attention_heads[stage], 16 // 2**stage
        inputs = torch.randn(2, size[0] * size[1], config.hidden_sizes[stage], generator=generator).double()
        named = {"inputs": inputs.requires_grad_(), **dict(attention.named_parameters())}
        shape = transnext_oracle.Attention(heads, reduction, config.window_size, pretrained, layer)
        mixers = config.mixers_of_layer(layer)
        expected = torch.stack(
            [
                torch.stack(transnext_oracle.attention(list(sequence), size, named, shape, mixers)[0])
                for sequence in inputs.unbind()
            ]
        )
        assert expected.abs().max() > 0.1
        truth = gradients(expected, named)
        for backend in ("eager", "sdpa"):
            model.set_attn_implementation(backend)
            output, _ = attention(inputs, feature_map(size, reduction, config.window_size, pretrained, inputs))
            assert (output - expected).abs().max() < OUTPUT_TOLERANCE
            for name, gradient in gradients(output, named).items():
                assert (gradient - truth[name]).abs().max() < GRADIENT_TOLERANCE, name


@pytest.mark.parametrize("case", first(["mixture", "plain", "talking"]))
def test_models_follow_the_oracle(case: str) -> None:
    """Compares logits, balance loss and the gradients of the total loss, for images with odd sides."""
    model = model_of(CASES[case]).double()
    images, named = IMAGES.double(), dict(model.named_parameters())
    results = [transnext_oracle.classifier(image, named, model.config) for image in images]
    logits = torch.stack([image_logits for image_logits, _ in results])
    output = model(images, labels=LABELS)
    assert (output.logits - logits).abs().max() < OUTPUT_TOLERANCE and logits.abs().max() > 0.1
    loss = functional.cross_entropy(logits, LABELS)
    if case == "mixture":
        losses = []
        for layer in (2, 3, 4):  # all heads of the other layers are shared
            probabilities, selected, _ = (
                torch.stack([torch.stack([token[part] for token in image[layer]]) for _, image in results])
                for part in range(3)
            )
            valid = torch.ones(probabilities.shape[:2], dtype=torch.bool)
            losses.append(oracle_routing.balance_loss([(probabilities, selected)], valid))
        balance = torch.stack(losses).mean()
        assert (output.balance_loss - balance).abs() < OUTPUT_TOLERANCE
        loss = loss + 0.01 * balance
    assert (output.loss - loss).abs() < OUTPUT_TOLERANCE
    expected = torch.autograd.grad(loss, list(named.values()))
    output.loss.backward()
    for (name, parameter), gradient in zip(named.items(), expected, strict=True):
        assert (parameter.grad - gradient).abs().max() < GRADIENT_TOLERANCE, name


@pytest.mark.oldest
@pytest.mark.parametrize("case", CASES)
def test_every_parameter_gets_a_gradient(case: str) -> None:
    model = model_of(CASES[case]).train()
    output = model(IMAGES, labels=LABELS, output_head_router_scores=True, output_hidden_states=True)
    output.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and (parameter.grad.abs().max() > 0 or name == CONSTANT), name
    assert [state.shape[1] for state in output.hidden_states] == [80, 80, 20, 6, 6, 2]
    if "mixture" in CASES[case]:
        plain = functional.cross_entropy(output.logits, LABELS)
        assert torch.allclose(output.loss - plain, 0.01 * output.balance_loss, atol=1e-6)
        routed = [0, 0, 2, 2, 4] if case != "knocking+mixture" else [3, 3, 3, 3]
        assert [scores.shape[-1] for scores in output.head_router_scores] == routed
    else:
        assert output.balance_loss is None


def test_balance_loss_is_none_when_all_heads_are_shared() -> None:
    shared = {"active_heads": [2, 4, 4, 4, 4], "shared_heads": [2, 4, 4, 4, 4]}
    assert model_of({"mixture": shared})(IMAGES, labels=LABELS).balance_loss is None


@pytest.mark.parametrize("case", ["mixture", "talking"])
def test_gradient_checkpointing_gives_the_same_gradients(case: str) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = model_of(CASES[case]).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(IMAGES, labels=LABELS).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("case", ["plain", "mixture"])
@torch.no_grad()
def test_half_precision_logits_are_close_to_float32(case: str) -> None:
    """Logits with bfloat16 weights and with autocast are close to float32; the router may select other heads."""
    expected = model_of(CASES[case])(IMAGES).logits
    half = model_of(CASES[case]).bfloat16()(IMAGES.bfloat16()).logits
    assert half.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        cast = model_of(CASES[case], backend="sdpa")(IMAGES).logits
    for logits in (half, cast):
        assert functional.cosine_similarity(logits.float(), expected, dim=-1).min() > 0.98


def test_trainer_accumulates_balance_loss_over_micro_batches(tmp_path: Path) -> None:
    """Accumulation over two micro-batches gives the same update as one batch, including the balance loss."""
    rows = [{"pixel_values": image, "labels": label} for image, label in zip(IMAGES, LABELS, strict=True)]
    trained, start = [], model_of(ROUTED).state_dict()
    for size, steps in ((2, 1), (1, 2)):
        arguments = TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            max_steps=1,
            report_to=[],
            optim="sgd",
            learning_rate=0.1,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        model = model_of(ROUTED)
        Trainer(model, arguments, train_dataset=rows).train()  # type: ignore[arg-type]
        trained.append(model.state_dict())
    for name, weight in trained[0].items():
        if name == CONSTANT:
            continue
        assert not torch.equal(weight, start[name]), name
        if ".mixers." not in name:
            # The balance loss is a product of means: for a batch it is close, not equal, to the mean over its halves.
            change, other = (state[name] - start[name] for state in trained)
            assert functional.cosine_similarity(change.flatten(), other.flatten(), dim=0) > 0.99, name


@pytest.mark.parametrize(
    "mixers",
    [
        {"knocking": {"on": ["query", "key", "value"]}, "gating": {}},
        {"talking": {"layers": [4]}},
        {"mixture": {"active_heads": [2, 4, 4, 4, 4], "shared_heads": 1, "gate": "binary"}},
    ],
    ids=lambda mixers: "+".join(mixers),
)
@torch.no_grad()
def test_added_mechanisms_start_neutral(mixers: dict[str, Any], tmp_path: Path) -> None:
    source = model_of({})
    source.save_pretrained(tmp_path)
    model = CrossheadTransNextForImageClassification.from_pretrained(tmp_path, mixers=mixers)
    assert list(model.config.mechanisms()) == list(mixers)
    assert (model(IMAGES).logits - source(IMAGES).logits).abs().max() < 1e-6


@pytest.mark.compile
@torch.no_grad()
def test_fullgraph_compile_gives_the_same_logits() -> None:
    model = model_of(ROUTED, backend="sdpa")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert (compiled(IMAGES).logits - model(IMAGES).logits).abs().max() < 1e-5


@torch.no_grad()
def test_logits_are_finite_for_any_image_size() -> None:
    """Image sizes may be no multiple of the strides, down to one pixel."""
    model = model_of(ROUTED)
    for size in ((1, 1), (17, 64), (61, 75), (96, 96)):
        images = torch.randn(1, 3, *size)
        assert model(images).logits.isfinite().all()


def test_initial_values_of_attention_and_patch_embedding() -> None:
    torch.manual_seed(0)
    model = CrossheadTransNextForImageClassification(CrossheadTransNextConfig(**SIZES, mixers=ROUTED))
    attention = model.transnext.block1[0].attn
    assert torch.allclose(functional.softplus(attention.temperature), torch.tensor(1 / 0.24))
    assert 0 < attention.query_embedding.abs().max() < 0.1 and attention.learnable_bias.abs().max() == 0
    assert 0 < attention.relative_pos_bias_local.abs().max() < 0.01
    convolution = model.transnext.patch_embed1.proj.weight
    assert abs(convolution.std() * (49 * 8 / 2) ** 0.5 - 1) < 0.1
    gates, _ = attention.mixers.mixture(torch.randn(2, 5, 8), torch.randn(2, 2, 5, 4))
    assert torch.allclose(gates.mean(-1), torch.ones(2, 5), atol=1e-6)  # gate_scale is "unit"


def test_drop_path_rate_grows_with_depth() -> None:
    model = model_of({}, drop_path_rate=0.5).train()
    rates = [layer.drop_path.drop_prob for _, layer, _ in model.transnext._attention_modules()]
    assert rates == [0.0, 0.125, 0.25, 0.375, 0.5]
    torch.manual_seed(0)
    assert not torch.equal(model(IMAGES).logits, model(IMAGES).logits)
