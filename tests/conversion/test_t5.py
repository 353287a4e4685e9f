"""Conversions of T5: round trips, options per part, fitted routers, old Hub checkpoints, and refused requests."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import crosshead
import toys
from crosshead.common.errors import ConversionError
from crosshead.conversion.architectures.mixer_tensors import starting_values
from crosshead.conversion.calibration.streamed import stream
from crosshead.conversion.mixers import read_request
from crosshead.conversion.options import with_recipe
from crosshead.conversion.sources.safetensors_store import SafetensorsStore
from encoder_toys import WORDS
from t5_toys import ANSWER, PARTS, write_t5
from tiers import grid
from toy_checkpoints import write_model

GENERATES = "ForConditionalGeneration"
VERSION_1_1 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
VARIANTS = {
    "t5": (GENERATES, {"num_decoder_layers": 3}),
    "v1.1": (GENERATES, {"is_untied": True, **VERSION_1_1}),
    # transformers ties the head of a v1.1 from scratch, but does not scale the outputs
    "tied v1.1, bf16 in many files": (GENERATES, {"dtype": "bfloat16", "many": True, **VERSION_1_1}),
    "without a head": ("Model", {}),
    "an encoder": ("EncoderModel", {}),
}
NEUTRAL = {
    "knocking": {"knocking": {"form": "linear", "on": ["query", "key", "value"]}},
    "talking": {"talking": {}},
    "explicit": {"explicit": {}},
    "gating": {"gating": {}},
    "mixture": {"mixture": {"active_heads": "100%"}},
    "together": {"talking": {"layers": [1]}, "explicit": {}, "mixture": {"active_heads": 4, "method": "paper"}},
}
AUTO = {GENERATES: "AutoModelForSeq2SeqLM", "Model": "AutoModel", "EncoderModel": "AutoModelForTextEncoding"}


def tensors(folder):
    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


def outputs(folder, task=GENERATES):
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = getattr(transformers, AUTO[task]).from_pretrained(folder, **options).eval()
    inputs = {"input_ids": toys.tokens()} | ({} if task == "EncoderModel" else {"decoder_input_ids": ANSWER})
    with torch.no_grad():
        result = model(**inputs)
    return result["logits" if task == GENERATES else "last_hidden_state"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A T5 checkpoint with more decoder layers than encoder layers; `words.txt` lies beside it."""
    folder = tmp_path_factory.mktemp("t5")
    (folder / "words.txt").write_text(WORDS)
    return write_t5(folder / "source", num_decoder_layers=3)


@pytest.mark.oldest
@pytest.mark.parametrize(("variant", "name"), grid(VARIANTS, NEUTRAL, strength=1))
def test_neutral_conversion_and_fold_round_trip(variant, name, tmp_path):
    task, changes = VARIANTS[variant]
    source = write_t5(tmp_path / "source", task, **changes)
    report = crosshead.convert(source, tmp_path / "made", NEUTRAL[name], verify=False)
    assert report["counts"]["rewritten"] == 0
    before, made = tensors(source), tensors(tmp_path / "made")
    assert ("lm_head.weight" in before) == (variant == "v1.1")
    assert all(torch.equal(made[key], before[key]) for key in before)
    expected, config = outputs(source, task), json.loads((tmp_path / "made" / "config.json").read_text())
    assert config["architectures"] == [f"CrossheadT5{task}"]
    assert torch.allclose(outputs(tmp_path / "made", task), expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
    crosshead.fold(tmp_path / "made", tmp_path / "back", verify=False)
    back = tensors(tmp_path / "back")
    assert back.keys() == before.keys() and all(torch.equal(back[key], before[key]) for key in before)
    assert torch.equal(outputs(tmp_path / "back", task), expected)
    stock = json.loads((tmp_path / "back" / "config.json").read_text())
    assert stock["model_type"] == "t5" and stock["torch_dtype"] == stock["dtype"]
    assert stock["tie_word_embeddings"] == ("v1.1" not in variant)  # transformers 4 scales outputs with tied weights
    verified = crosshead.verify(source, tmp_path / "made")["verification"]
    assert verified["must_equal"] and verified["reload"]["checked"] == "logits and text"
    assert (verified["kv_bytes_per_token_before"] == 0) == (task == "EncoderModel")


def test_trained_mixers_fold_into_projections(source, tmp_path):
    mixers = {"knocking": {"form": "linear", "on": ["query", "key", "value"]}, "explicit@decoder+cross": {}}
    crosshead.convert(source, tmp_path / "made", mixers, verify=False)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "made")
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".mixers." in name:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    write_model(model, tmp_path / "trained")
    report = crosshead.fold(tmp_path / "trained", tmp_path / "back")
    assert report["verification"]["must_equal"] and report["counts"]["rewritten"] == 3 * 8
    expected, result = outputs(tmp_path / "trained"), outputs(tmp_path / "back")
    assert (result - expected).norm() <= 1e-5 * expected.norm()
    assert (result - outputs(source)).norm() > 1e-2 * expected.norm()


def test_streamed_model_gives_same_logits(source):
    """The encoder reads the first half of a window; the decoder reads its start token and the second half."""
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(source, attn_implementation="eager").eval()
    tokens = toys.tokens(length=11)
    answer = torch.cat([torch.zeros(2, 1, dtype=torch.long), tokens[:, 6:]], dim=1)
    streamed = stream(SafetensorsStore(source), model.config, attn_implementation="eager")
    assert torch.equal(streamed.predicted(tokens), answer)
    with torch.no_grad(), streamed.head() as head:
        expected = model(input_ids=tokens[:, :5], decoder_input_ids=answer).logits
        assert torch.allclose(head(streamed.run(tokens)), expected, atol=1e-6)


def test_random_starting_values_have_std_of_model_initialisation():
    config = toys.mixed_config("T5", {"cross": {"mixture": {"active_heads": 3}}})
    drawn = [starting_values(config, 3, seed)["mixers.mixture.routed.weight"] for seed in range(20)]
    assert torch.stack(drawn).std() == pytest.approx(config.d_model**-0.5, rel=0.1)
    assert not starting_values(config, 2, 0)


BY_PART = {
    "encoder": {"talking": {}},
    "decoder": {"mixture": {"active_heads": [3, 3, 2], "method": "paper"}, "knocking": {"form": "linear"}},
    "cross": {"talking": {}, "knocking": {"form": "linear"}},
}
ARGUMENTS = [
    "talking@encoder+cross",
    "mixture@decoder:active_heads=75%+3+50%,method=paper",
    "knocking@decoder+cross:form=linear",
]
RECIPE = """
mixers:
  talking@encoder+cross:
  mixture@decoder: {active_heads: [75%, 3, 50%], method: paper}
  knocking@decoder+cross: {form: linear}
"""


def test_mixer_options_apply_to_named_parts(source, tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    config = transformers.AutoConfig.from_pretrained(source)
    config = crosshead.CrossheadT5Config.from_dict(config.to_dict())
    requests = [BY_PART, with_recipe(None, ARGUMENTS, {})[0], with_recipe(tmp_path / "recipe.yaml", [], {})[0]]
    expected, *others = [read_request(each, config) for each in requests]
    assert all(other == expected for other in others)
    assert list(expected.mixers["decoder"]) == ["mixture", "knocking"]
    assert expected.mixers["decoder"]["mixture"]["active_heads"] == [3, 3, 2]
    report = crosshead.convert(source, tmp_path / "made", requests[1], verify=False)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "made")
    assert {part: list(mixers) for part, mixers in model.config.mixers.items()} == {
        part: list(BY_PART[part]) for part in PARTS
    }
    attention = [block.layer[0].SelfAttention for block in model.decoder.block]
    assert [each.mixers["mixture"].settings["active_heads"] for each in attention] == [3, 3, 2]
    assert report["options"]["choices"]["decoder"]["mixture"]["method"] == "paper"
    assert {name.partition(".mixers.")[0] for name in report["tensors"] if "talking" in name} == {
        *(f"encoder.block.{layer}.layer.0.SelfAttention" for layer in range(2)),
        *(f"decoder.block.{layer}.layer.1.EncDecAttention" for layer in range(3)),
    }


def test_fewer_component_heads_in_decoder_only(source, tmp_path):
    mixers = {"explicit@decoder": {"key_heads": "50%", "value_heads": [4, 3, 2], "method": "svd"}}
    report = crosshead.convert(source, tmp_path / "made", mixers)
    assert not report["verification"]["must_equal"] and 0 < report["verification"]["kl_divergence"] < 1
    keys = tensors(tmp_path / "made")
    assert keys["decoder.block.2.layer.0.SelfAttention.v.weight"].shape == (16, 32)
    assert keys["decoder.block.2.layer.1.EncDecAttention.v.weight"].shape == (32, 32)
    before, after = (report["verification"][f"kv_bytes_per_token_{when}"] for when in ("before", "after"))
    assert (before, after) == (4 * 8 * 3 * (8 + 8), 4 * 8 * (3 * 8 + (2 + 4) + (2 + 3) + (2 + 2)))
    crosshead.fold(tmp_path / "made", tmp_path / "back", verify=False)
    assert torch.allclose(outputs(tmp_path / "back"), outputs(tmp_path / "made"), atol=1e-5)


def test_fitted_router_is_closer_to_source_than_paper_router(source, tmp_path):
    options = {"calibration": source.parent / "words.txt"}
    crosshead.convert(source, tmp_path / "fitted", {"mixture": {"active_heads": 3}}, **options, verify=False)
    paper = {"mixture": {"active_heads": 3, "method": "paper"}}
    crosshead.convert(source, tmp_path / "paper", paper, verify=False)
    expected, fitted, plain = (outputs(folder) for folder in (source, tmp_path / "fitted", tmp_path / "paper"))
    assert 0 < (fitted - expected).norm() < (plain - expected).norm()
    made, before = tensors(tmp_path / "fitted"), tensors(source)
    attention = "decoder.block.2.layer.1.EncDecAttention"
    assert made[f"{attention}.mixers.mixture.routed.weight"].shape == (4, 32)
    assert not torch.equal(made[f"{attention}.o.weight"], before[f"{attention}.o.weight"])


def test_bilinear_conversion_keeps_source_outputs(source, tmp_path):
    report = crosshead.convert(source, tmp_path / "made", {"bilinear": {}, "gating": {}})
    assert report["verification"]["must_equal"] and report["counts"]["dropped"] == 2 * 8
    assert torch.allclose(outputs(tmp_path / "made"), outputs(source), atol=1e-5)
    with pytest.raises(ConversionError, match="'bilinear'"):
        crosshead.fold(tmp_path / "made", tmp_path / "back")


def test_old_hub_t5_checkpoint_converts_exactly(source, tmp_path):
    """Old checkpoints store the embedding four times, and a cross-attention position bias that no class has."""
    folder = write_t5(tmp_path / "source", num_decoder_layers=3)
    state, bias = tensors(source), "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    tied = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    state |= {name: state["shared.weight"].clone() for name in tied} | {bias: torch.ones(32, 4)}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    report = crosshead.convert(folder, tmp_path / "made", {"talking": {}}, vocab_size=64)
    assert report["verification"]["must_equal"] and list(report["dropped"]) == [bias]
    grown = {name for name, each in report["tensors"].items() if each["fate"] == "rewritten"}
    assert grown == {"shared.weight", *tied}
    assert torch.allclose(outputs(tmp_path / "made")[..., :61], outputs(source), atol=1e-6)


def test_encoder_checkpoint_with_embed_tokens_name_converts(tmp_path):
    folder = write_t5(tmp_path / "source", "EncoderModel")
    state = tensors(folder)
    state["encoder.embed_tokens.weight"] = state.pop("shared.weight")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"is_encoder_decoder": True}
    (folder / "config.json").write_text(json.dumps(config))
    report = crosshead.convert(folder, tmp_path / "made", {"knocking": {}})
    assert report["verification"]["must_equal"] and report["verification"]["token_cosine"] == pytest.approx(1)
    assert report["options"]["mixers"]["decoder"] == {}
    assert torch.equal(outputs(tmp_path / "made", "EncoderModel"), outputs(folder, "EncoderModel"))
    with pytest.raises(ConversionError, match="'cross'"):
        crosshead.convert(folder, tmp_path / "other", {"knocking@cross": {}})


@pytest.mark.parametrize(
    ("mixers", "options", "words"),
    [
        ({"talking@encodr": {}}, {}, ["'encodr'", "'encoder'"]),
        ({"talking@": {}}, {}, ["talking@", "'encoder'"]),
        ({"talking@encoder+encoder": {}}, {}, ["talking", "'encoder'"]),
        ({"talking": {}, "talking@cross": {}}, {}, ["talking", "'cross'"]),
        ({"encoder": {"talking": {}}, "talking@encoder": {}}, {}, ["talking", "'encoder'"]),
        ({"encoder": "talking"}, {}, ["mixers.encoder='talking'"]),
        ({"tolking@encoder": {}}, {}, ["'tolking'", "'talking'"]),
        ({"mixture@decoder": {"active_heads": 9, "method": "paper"}}, {}, ["mixers.decoder", "active_heads=9"]),
        ({"mixture@cross": {"active_heads": "75%+75%"}}, {}, ["mixers.cross", "active_heads=[3, 3]", "list of 3"]),
        ({"explicit@cross": {"key_heads": 2}}, {}, ["method=svd"]),
        ({"mixture": {"active_heads": 3, "shared_heads": 1, "shared": "calibrated"}}, {}, ["shared=calibrated"]),
        ({"differential@encoder": {"half_values": True}}, {}, ["half_values"]),
        ({"differential@encoder": {}}, {}, ["'differential'", "--allow-inexact"]),
        ({}, {"cache": "50%"}, ["--cache"]),
        ({}, {"active": "50%"}, ["--active"]),
        ({}, {}, ["--mixer"]),
    ],
    ids=str,
)
def test_invalid_requests_are_refused(mixers, options, words, source, tmp_path):
    with pytest.raises(ConversionError) as caught:
        crosshead.convert(source, tmp_path / "made", mixers, **options)
    assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in words)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("target", "options", "word"), [("back", {"keep_cache": True}, "--keep-cache"), ("back.gguf", {}, "back.gguf")]
)
def test_keep_cache_and_gguf_folds_are_refused(target, options, word, source, tmp_path):
    crosshead.convert(source, tmp_path / "made", {"explicit": {}}, verify=False)
    with pytest.raises(ConversionError, match=word):
        crosshead.fold(tmp_path / "made", tmp_path / target, **options)
    assert not (tmp_path / target).exists()
