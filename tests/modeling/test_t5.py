"""T5: mechanisms per part of the model, position biases, cross-attention, generation, and `bilinear`."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

import crosshead
import oracles
from oracle_layers import GRADIENT_TOLERANCE, OUTPUT_TOLERANCE, gradients
from t5_toys import ANSWER, INPUTS, MASK, MIXTURE, PARTS, PartLayer, oracle_balance_loss
from tiers import grid
from toys import ENCODER_CASES, NEUTRAL, T5_SIZES, lopsided, mixed_config, mixed_model, stock_model, tokens

each_case_on_a_part = pytest.mark.parametrize(("case", "part"), grid(ENCODER_CASES, PARTS, strength=1))
each_case = pytest.mark.parametrize("case", ENCODER_CASES)


@each_case_on_a_part
def test_attention_follows_the_oracle(case: str, part: str) -> None:
    for backend in ("eager", "sdpa"):
        layer = PartLayer(part, ENCODER_CASES[case], backend)
        ours, truth = layer.ours(), layer.truth()
        assert truth.abs().max() > 0.1
        assert (ours - truth).abs().max() < OUTPUT_TOLERANCE, backend
        leaves = {"inputs": layer.inputs, **dict(layer.attention.named_parameters())}
        expected = gradients(truth, leaves)
        for name, gradient in gradients(ours, leaves).items():
            assert (gradient - expected[name]).abs().max() < GRADIENT_TOLERANCE, name


def random_tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Return random tensors of the given shapes in float64."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[0] ** 0.5 for shape in shapes]


def bilinear_layer(p: Tensor, q: Tensor) -> PartLayer:
    """Return a `bilinear` layer with the paper's tensors P (d_X, d_M, h) and Q (d_M, d_Y, h)."""
    layer = PartLayer("encoder", {"bilinear": {}})
    with torch.no_grad():
        layer.attention.q.weight.copy_(p.permute(2, 1, 0).flatten(0, 1))
        layer.attention.o.weight.copy_(q.permute(1, 2, 0).flatten(1))
    return layer


def test_bilinear_follows_the_oracle() -> None:
    p, q = random_tensors((32, 32, 4), (32, 32, 4))
    layer = bilinear_layer(p, q)
    bias = layer.bias()
    assert bias is not None
    for b in range(2):
        truth = oracles.bilinear(layer.inputs[b], layer.inputs[b], p, q, layer.allowed[b], bias)
        assert (layer.ours()[b] - truth).abs().max() < OUTPUT_TOLERANCE


@pytest.mark.parametrize("mechanism", ["multi-head", "talking"])
def test_bilinear_reproduces_multi_head_and_talking_attention(mechanism: str) -> None:
    """Section 6 of the paper: with `P` and `Q` set to products of projections (and head maps), outputs are equal."""
    layer = PartLayer("encoder", {"talking": {"softmax_heads": 4}} if mechanism == "talking" else {"knocking": {}})
    attention, bias = layer.attention, layer.attention.relative_attention_bias.weight
    with torch.no_grad():
        bias.zero_()  # the paper's form has no bias
    per_head = {name: getattr(attention, name).weight.view(4, 8, 32) for name in "qkv"}
    out = attention.o.weight.view(32, 4, 8)
    if mechanism == "talking":
        maps = [getattr(attention.mixers["talking"], name).weight for name in ("logits", "weights")]
    else:
        maps = [torch.eye(4, dtype=torch.float64)] * 2
        attention.mixers = torch.nn.ModuleDict()
        attention.mapping_order, attention.output_order = [], []
    p = torch.einsum("kdx,kdm,hk->xmh", per_head["q"], per_head["k"], maps[0])
    q = torch.einsum("vdm,yvd,vh->myh", per_head["v"], out, maps[1])
    bilinear = bilinear_layer(p, q)
    with torch.no_grad():
        bilinear.attention.relative_attention_bias.weight.zero_()
    assert (bilinear.ours() - layer.ours()).abs().max() < OUTPUT_TOLERANCE
    assert layer.ours().abs().max() > 0.1


def test_bilinear_parameter_count_matches_paper() -> None:
    """Table 1 of the paper: 14,155,776 parameters per `bilinear` layer, 2,359,296 per multi-head attention layer."""
    config = mixed_config("T5", {"encoder": {"bilinear": {}}}, d_model=768, num_heads=12, d_kv=64)
    with torch.device("meta"):
        model = crosshead.CrossheadT5ForConditionalGeneration(config)
    counts = [
        sum(weight.numel() for name, weight in layer.named_parameters() if "relative" not in name)
        for layer in (model.encoder.block[1].layer[0].SelfAttention, model.decoder.block[1].layer[0].SelfAttention)
    ]
    assert counts == [14_155_776, 2_359_296]


@pytest.mark.oldest
@pytest.mark.parametrize("mechanism", [name for name in NEUTRAL if NEUTRAL[name]])
@torch.no_grad()
def test_neutral_start_is_the_stock_model(mechanism: str, tmp_path: Path) -> None:
    stock = stock_model("T5")
    stock.save_pretrained(tmp_path)
    calls = {**INPUTS, "labels": ANSWER}
    for mixers in (*NEUTRAL[mechanism], {"cross": NEUTRAL[mechanism][0]}):
        for backend in ("eager", "sdpa"):
            ours = crosshead.CrossheadT5ForConditionalGeneration.from_pretrained(
                tmp_path, mixers=mixers, attn_implementation=backend
            ).eval()
            stock.set_attn_implementation(backend)
            difference = (ours(**calls).logits - stock(**calls).logits).abs().max()
            # Blockwise talking sums in another order; the stock class passes a zero bias, which may change the kernel.
            assert difference <= (0 if backend == "eager" else 1e-5 if mechanism == "talking" else 1e-6)


@pytest.mark.oldest
@each_case
@torch.no_grad()
def test_saved_model_loads_by_auto_class_and_remote_code(case: str, warm_process: Any, tmp_path: Path) -> None:
    model, environment = mixed_model("T5", ENCODER_CASES[case]), os.environ | {"HF_HUB_OFFLINE": "1"}
    model.save_pretrained(tmp_path / "model")
    expected = model(input_ids=tokens(), decoder_input_ids=tokens()).logits
    again = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
    assert type(again) is crosshead.CrossheadT5ForConditionalGeneration
    assert torch.equal(again(input_ids=tokens(), decoder_input_ids=tokens()).logits, expected)
    save_file({"ids": tokens()}, tmp_path / "inputs.safetensors")
    worker = Path(__file__).with_name("remote_code_worker.py")
    command = [sys.executable, "-P", str(worker), str(tmp_path)]
    done = warm_process.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert torch.equal(load_file(tmp_path / "outputs.safetensors")["logits"], expected)


@pytest.mark.oldest
@each_case
@torch.no_grad()
def test_cached_generation_equals_uncached(case: str) -> None:
    """Cached steps equal the full forward pass; generation is the same with beams, a static cache and no cache."""
    for backend in ("eager", "sdpa"):
        model = mixed_model("T5", ENCODER_CASES[case], backend=backend)
        whole = model(**INPUTS, decoder_input_ids=ANSWER, use_cache=False).logits
        out = model(**INPUTS, decoder_input_ids=ANSWER[:, :3])
        later: dict[str, Any] = {"encoder_outputs": (out.encoder_last_hidden_state,), "attention_mask": MASK}
        for t in (3, 4):
            step = model(**later, decoder_input_ids=ANSWER[:, t : t + 1], past_key_values=out.past_key_values)
            assert (step.logits[:, 0] - whole[:, t]).abs().max() < 1e-4
        options: dict[str, Any] = {**INPUTS, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        expected = model.generate(**options)
        for changes in ({"use_cache": False}, {"cache_implementation": "static"}):
            assert torch.equal(model.generate(**options, **changes), expected), changes
        beams = {"num_beams": 3}
        assert torch.equal(model.generate(**options, **beams), model.generate(**options, **beams, use_cache=False))


@torch.no_grad()
def test_cross_attention_cache_is_filled_once() -> None:
    model = mixed_model("T5", {"cross": {"explicit": {"key_heads": 2, "value_heads": 1}}})
    out = model(**INPUTS, decoder_input_ids=ANSWER)
    stored = out.past_key_values.cross_attention_cache.layers[0].keys
    assert stored.shape == (2, 1, 9, 16)
    model(
        encoder_outputs=(out.encoder_last_hidden_state,),
        decoder_input_ids=ANSWER[:, :1],
        past_key_values=out.past_key_values,
    )
    assert out.past_key_values.cross_attention_cache.layers[0].keys is stored


@torch.no_grad()
def test_encoder_decoder_and_cross_attention_have_separate_mixers(tmp_path: Path) -> None:
    mixers = {"encoder": {"talking": {}}, "cross": {"mixture": {"active_heads": [2, 3, 4]}}}
    model = mixed_model("T5", mixers, num_decoder_layers=3)
    names = {name.split(".mixers.")[0] for name, _ in model.named_parameters() if ".mixers." in name}
    encoder = {f"encoder.block.{layer}.layer.0.SelfAttention" for layer in range(2)}
    assert names == encoder | {f"decoder.block.{layer}.layer.1.EncDecAttention" for layer in range(3)}
    assert list(model.config.mixers) == list(PARTS) and model.config.mixers["decoder"] == {}
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert torch.equal(again(**INPUTS, labels=ANSWER).logits, model(**INPUTS, labels=ANSWER).logits)


@torch.no_grad()
def test_encoder_and_base_model_load_from_full_checkpoint(tmp_path: Path) -> None:
    model = mixed_model("T5", {"encoder": {"talking": {}, **MIXTURE}})
    model.save_pretrained(tmp_path)
    alone = crosshead.CrossheadT5EncoderModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    out = alone(**INPUTS, output_head_router_scores=True)
    assert torch.equal(out.last_hidden_state, model.encoder(**INPUTS).last_hidden_state)
    assert len(out.head_router_scores) == 2
    whole = crosshead.CrossheadT5Model.from_pretrained(tmp_path, attn_implementation="eager").eval()
    output = whole(**INPUTS, decoder_input_ids=ANSWER, output_head_router_scores=True)
    assert torch.equal(output.encoder_last_hidden_state, out.last_hidden_state)
    assert len(output.head_router_scores) == 2


@torch.no_grad()
def test_loss_with_past_and_decoder_mask_is_loss_of_new_tokens() -> None:
    """The decoder mask covers cached and new tokens."""
    model, rest, mask = mixed_model("T5", MIXTURE), ANSWER[:, 2:].contiguous(), torch.ones_like(ANSWER)
    mask[1, 0] = 0
    past = model(**INPUTS, decoder_input_ids=ANSWER[:, :2], decoder_attention_mask=mask[:, :2])
    inputs = {"encoder_outputs": (past.encoder_last_hidden_state,), "attention_mask": MASK}
    inputs |= {"decoder_attention_mask": mask, "output_head_router_scores": True}
    whole = model(**inputs, decoder_input_ids=ANSWER)
    balance = oracle_balance_loss([scores[:, 2:] for scores in whole.head_router_scores], mask[:, 2:])
    expected = functional.cross_entropy(whole.logits[:, 2:].flatten(0, 1), rest.flatten()) + 0.01 * balance
    out = model(**inputs, decoder_input_ids=rest, past_key_values=past.past_key_values, labels=rest)
    torch.testing.assert_close(out.loss, expected)
    model.config.output_head_router_scores = True
    prompt = {"decoder_input_ids": ANSWER, "decoder_attention_mask": mask}
    assert model.generate(**INPUTS, **prompt, max_new_tokens=3).shape[1] > ANSWER.shape[1]


def test_loss_includes_mean_balance_loss_of_encoder_and_decoder() -> None:
    model = mixed_model("T5", MIXTURE)
    out = model(
        **INPUTS, labels=ANSWER, decoder_attention_mask=torch.ones_like(ANSWER), output_head_router_scores=True
    )
    assert len(out.head_router_scores) == 6
    encoder = oracle_balance_loss(out.head_router_scores[:2], MASK)
    decoder = oracle_balance_loss(out.head_router_scores[2:], torch.ones_like(ANSWER))
    assert torch.allclose(out.balance_loss, (encoder + decoder) / 2)
    plain = functional.cross_entropy(out.logits.flatten(0, 1), ANSWER.flatten())
    assert torch.allclose(out.loss - plain, 0.01 * out.balance_loss, atol=1e-6)
    assert "balance_loss" not in model(**INPUTS, decoder_input_ids=ANSWER)


@each_case
def test_every_parameter_gets_a_gradient_with_and_without_checkpointing(case: str) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = mixed_model("T5", ENCODER_CASES[case]).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(**INPUTS, labels=ANSWER).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0, name
        assert torch.allclose(gradient, gradients[1][name], atol=1e-6), name


def test_initial_values_have_the_stock_scale() -> None:
    torch.manual_seed(0)
    config = mixed_config("T5", {"encoder": {"bilinear": {}}, "decoder": {"explicit": {"key_heads": 2}}}, d_model=64)
    ours = crosshead.CrossheadT5ForConditionalGeneration(config)
    stock = stock_model("T5", d_model=64).__class__(transformers.T5Config(**{**T5_SIZES, "d_model": 64}))
    theirs = dict(stock.named_parameters())
    for name, parameter in ours.named_parameters():
        if name.startswith("decoder") and name in theirs and theirs[name].numel() > 500:
            assert 0.9 < parameter.std() / theirs[name].std() < 1.1, name
    attention = ours.encoder.block[0].layer[0].SelfAttention
    # Standard deviations 1 / d for the entries of P, and 1 / sqrt(h d) for Q.
    assert abs(attention.q.weight.std() * 64 - 1) < 0.05
    assert abs(attention.o.weight.std() * (4 * 64) ** 0.5 - 1) < 0.05


@torch.no_grad()
def test_bfloat16_logits_are_close_to_float32() -> None:
    for case in ENCODER_CASES:
        model = mixed_model("T5", ENCODER_CASES[case], backend="sdpa")
        expected = model(**INPUTS, decoder_input_ids=ANSWER).logits
        logits = model.to(torch.bfloat16)(**INPUTS, decoder_input_ids=ANSWER).logits.float()
        # T5 does not scale attention logits, so rounding changes the softmax of these random weights considerably.
        assert functional.cosine_similarity(logits.flatten(), expected.flatten(), 0) > 0.9, case


@pytest.mark.parametrize(
    ("mixers", "changes", "key"),
    [
        ({"encoder": {"knocking": {}}, "decodr": {}}, {}, "decodr"),
        ({"encoder": {"knocking": {}}, "talking": {}}, {}, "talking"),
        ({"cross": {"explicit": {"key_heads": 9}}}, {}, "mixers.cross: mixers.explicit.key_heads"),
        ({"decoder": {"mixture": {"active_heads": [2, 2]}}}, {"num_decoder_layers": 3}, "mixers.decoder"),
        ({"bilinear": {}, "talking": {}}, {}, "mixers.talking"),
        ({"differential": {}}, {"dropout_rate": 0.1}, "attention_dropout"),
        (
            {"encoder": {"mixture": {"active_heads": 2, "balance_weight": 0.1}}, "cross": MIXTURE},
            {},
            "mixers.cross.mixture.balance_weight",
        ),
        ("talking", {}, "mixers"),
    ],
)
def test_invalid_mixers_are_refused(mixers: Any, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        mixed_config("T5", mixers, **changes)


def test_bilinear_refuses_rotary_positions() -> None:
    with pytest.raises(ValueError, match="rotary"):
        mixed_config("Llama", {"bilinear": {}})


def test_talking_refuses_flex_attention() -> None:
    model = lopsided(crosshead.CrossheadT5ForConditionalGeneration(mixed_config("T5", {"talking": {}})))
    with pytest.raises(ValueError, match="flex_attention"):
        model.set_attn_implementation("flex_attention")
