"""Conversions of BERT and ALBERT: every task head, round trips, streaming, limits and old Hub checkpoints."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModel

import crosshead
import toys
from crosshead.common.errors import ConversionError
from crosshead.conversion.architectures.encoder_limits import LIMITS
from crosshead.conversion.calibration.streamed import stream
from crosshead.conversion.compress import fitted_router
from crosshead.conversion.compress.layer_probe import probe_layers
from crosshead.conversion.convert import resolve
from crosshead.conversion.options import Options
from crosshead.conversion.sources.resolve import open_source
from crosshead.conversion.sources.safetensors_store import SafetensorsStore
from encoder_toys import write_encoder
from image_toys import write_image_model
from t5_toys import write_t5
from tiers import grid

TASKS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
NEUTRAL = {
    "knocking": {"form": "linear"},
    "talking": {},
    "explicit": {"norm": False},
    "gating": {},
    "mixture": {"active_heads": 4, "gate": "binary"},
}


def hidden_states(folder, batch=2):
    with torch.no_grad():
        model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
        return model(toys.tokens(batch)).last_hidden_state


@pytest.mark.oldest
@pytest.mark.parametrize(("backbone", "task", "name"), grid(toys.ENCODERS, TASKS, NEUTRAL, strength=1))
def test_neutral_conversion_and_fold_round_trip(backbone, task, name, tmp_path):
    source = write_encoder(tmp_path / "source", backbone, task)
    report = crosshead.convert(source, tmp_path / "made", {name: NEUTRAL[name]})
    assert report["verification"]["must_equal"]
    assert report["verification"]["token_cosine"] == pytest.approx(1)
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert config["architectures"] == [f"Crosshead{backbone}{task}"]
    assert torch.allclose(hidden_states(tmp_path / "made"), hidden_states(source), atol=1e-5)
    crosshead.fold(tmp_path / "made", tmp_path / "back")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.allclose(before[key], after[key], atol=1e-6) for key in before)
    crosshead.verify(source, tmp_path / "made")


@pytest.mark.parametrize("backbone", toys.ENCODERS)
def test_larger_vocabulary_extends_masked_lm_logits(backbone, tmp_path):
    source = write_encoder(tmp_path / "source", backbone, "ForMaskedLM")
    crosshead.convert(source, tmp_path / "made", {"gating": {}}, vocab_size=70, verify=False)
    read = transformers.AutoModelForMaskedLM.from_pretrained
    tokens = toys.tokens()
    with torch.no_grad():
        logits, expected = (read(folder).eval()(tokens).logits for folder in (tmp_path / "made", source))
    assert logits.shape[-1] == 70
    torch.testing.assert_close(logits[..., : expected.shape[-1]], expected)
    torch.testing.assert_close(logits[..., -1], expected.mean(-1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backbone", toys.ENCODERS)
def test_fewer_component_heads_give_similar_hidden_states(backbone, tmp_path):
    source = write_encoder(tmp_path / "source", backbone)
    mixers = {"explicit": {"key_heads": 4, "value_heads": 3, "norm": False, "method": "svd"}}
    report = crosshead.convert(source, tmp_path / "made", mixers)
    assert not report["verification"]["must_equal"]
    assert 0.5 < report["verification"]["token_cosine"] < 1


def test_estimated_minimum_bytes_are_below_written_size(tmp_path):
    source = write_encoder(tmp_path / "source")
    mixers = {"explicit": {"key_heads": 1, "value_heads": 1, "norm": False, "method": "svd"}}
    crosshead.convert(source, tmp_path / "made", mixers, verify=False)
    written = sum(path.stat().st_size for path in (tmp_path / "made").glob("*.safetensors"))
    minimum = resolve(open_source(source, scratch=tmp_path), mixers, Options()).minimum_bytes
    assert 0.5 * written < minimum < written


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fitted_router_has_higher_cosine_than_paper_router(dtype, tmp_path, monkeypatch):
    """Inputs are recorded in bfloat16 on processors that support it, in float32 on others."""
    monkeypatch.setattr(fitted_router, "fast_dtype", lambda: dtype)
    source = write_encoder(tmp_path / "source")
    options = {"calibration": tmp_path / "words.txt"}
    fitted = crosshead.convert(source, tmp_path / "fitted", {"mixture": {"active_heads": 3}}, **options)
    plain = crosshead.convert(source, tmp_path / "paper", {"mixture": PAPER})
    assert fitted["verification"]["token_cosine"] > plain["verification"]["token_cosine"]
    assert torch.allclose(hidden_states(tmp_path / "fitted").mean(), hidden_states(source).mean(), atol=0.5)


PAPER = {"active_heads": 3, "method": "paper", "router": "query_norm", "gate": "binary"}
REQUESTS = {
    LIMITS[0].conversion: ("Bert", {"explicit": {}}, {"cache": "50%"}),
    LIMITS[1].conversion: ("Bert", {"explicit": {"key_heads": 2, "norm": False}}, {}),
    LIMITS[2].conversion: ("Bert", {"mixture": PAPER | {"shared_heads": 1, "shared": "calibrated"}}, {}),
    LIMITS[3].conversion: ("Albert", {"mixture": {"active_heads": 3}}, {}),
    LIMITS[4].conversion: ("Bert", {"differential": {"half_values": True, "norm": False}}, {}),
    LIMITS[5].conversion: ("T5", {"differential": {"version": 2}}, {}),
    LIMITS[6].conversion: ("Bert", {"bilinear": {}}, {}),
    LIMITS[7].conversion: ("ViT", {"knocking": {}}, {"vocab_size": 99}),
}


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.conversion)
def test_unsupported_encoder_conversions_are_refused(limit, tmp_path):
    backbone, mixers, options = REQUESTS[limit.conversion]
    write = {"ViT": write_image_model, "T5": lambda folder, _: write_t5(folder)}.get(backbone, write_encoder)
    source = write(tmp_path / "source", backbone)
    with pytest.raises(ConversionError) as caught:
        crosshead.convert(source, tmp_path / "made", mixers, **options)
    assert limit.conversion in str(caught.value) and limit.reason in str(caught.value)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("backbone", toys.ENCODERS)
def test_streamed_encoder_gives_same_hidden_states(backbone, tmp_path):
    source = write_encoder(tmp_path / "source", backbone, hidden_size=32)
    config = transformers.AutoConfig.from_pretrained(source)
    streamed = stream(SafetensorsStore(source), config, attn_implementation="eager")
    with torch.no_grad():
        assert torch.equal(streamed.run(toys.tokens(1)), hidden_states(source, batch=1))


def test_old_hub_bert_checkpoint_converts_exactly(tmp_path):
    """Old checkpoints have other norm names, pretraining heads, copies of tied weights, and position ids."""
    source = write_encoder(tmp_path / "source", task="ForPreTraining")
    expected = hidden_states(source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(
        json.dumps(config | {"architectures": ["BertForMaskedLM"], "num_return_sequences": 3})
    )
    weights = load_file(source / "model.safetensors")
    weights["cls.predictions.decoder.weight"] = weights["bert.embeddings.word_embeddings.weight"].clone()
    weights["bert.embeddings.position_ids"] = torch.arange(128)[None]
    older = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {}
    for name, weight in weights.items():
        for new, old in older.items():
            name = name.removesuffix(new) + old if name.endswith(new) else name
        renamed[name] = weight
    save_file(renamed, source / "model.safetensors", metadata={"format": "pt"})
    report = crosshead.convert(source, tmp_path / "made", {"talking": {}})
    assert report["verification"]["must_equal"]
    heads = {"cls.seq_relationship.weight", "bert.pooler.dense.bias", "cls.predictions.decoder.weight"}
    assert heads <= set(report["dropped"]) and not (tmp_path / "made" / "generation_config.json").exists()
    assert torch.equal(hidden_states(tmp_path / "made"), expected)


def test_message_names_field_of_sources_config(tmp_path):
    source = write_encoder(tmp_path / "source", attention_probs_dropout_prob=0.1)
    with pytest.raises(ConversionError, match=r"^attention_probs_dropout_prob=0\.1 "):
        crosshead.convert(source, tmp_path / "made", {"differential": {}}, allow_inexact=True)


def test_sentence_transformers_files_are_copied(tmp_path):
    source = write_encoder(tmp_path / "source", task="Model")
    (source / "modules.json").write_text('[{"idx": 0, "path": ""}, {"idx": 1, "path": "1_Pooling"}]')
    (source / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    crosshead.convert(source, tmp_path / "made", {"knocking": {}})
    for name in ("modules.json", "sentence_bert_config.json", "1_Pooling/config.json"):
        assert (tmp_path / "made" / name).read_bytes() == (source / name).read_bytes()
    crosshead.convert(source, tmp_path / "made", {"gating": {}}, overwrite=True)
    shutil.copytree(source / "1_Pooling", source / "2_Dense")
    (source / "1_Pooling" / "weights.bin").write_bytes(b"")
    with pytest.raises(ConversionError, match="1_Pooling"):
        crosshead.convert(source, tmp_path / "other", {"knocking": {}})


def test_gguf_fold_and_layer_probe_refuse_encoders(tmp_path):
    source = write_encoder(tmp_path / "source")
    with pytest.raises(ConversionError, match="GGUF"):
        crosshead.fold(source, tmp_path / "out.gguf")
    with pytest.raises(ConversionError, match="source"):
        probe_layers(source)
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize(
    "name", ["BertForMultipleChoice", "BertForNextSentencePrediction", "T5ForTokenClassification"]
)
def test_unsupported_architecture_classes_are_refused(name, tmp_path):
    source = write_encoder(tmp_path / "source", "Bert")
    content = json.loads((source / "config.json").read_text()) | {"architectures": [name]}
    content["model_type"] = "t5" if name.startswith("T5") else "bert"
    (source / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConversionError, match=f"{name}.*convert one of"):
        crosshead.convert(source, tmp_path / "made", {"talking": {}})


def test_sentence_transformers_modules_with_weights_are_refused(tmp_path):
    source = write_encoder(tmp_path / "source", "Bert", "Model")
    types = ("models.Transformer", "models.Pooling", "models.Dense")
    modules = [
        {"idx": index, "path": f"{index}", "type": f"sentence_transformers.{each}"} for index, each in enumerate(types)
    ]
    (source / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConversionError, match="Dense"):
        crosshead.convert(source, tmp_path / "made", {"talking": {}})


def test_differential_version_2_is_refused_for_albert(tmp_path):
    source = write_encoder(tmp_path / "source", "Albert")
    with pytest.raises(ConversionError, match="albert models; it pairs"):
        crosshead.convert(source, tmp_path / "made", {"differential": {"version": 2}})


def test_bert_config_with_cross_attention_is_refused():
    with pytest.raises(ValueError, match="add_cross_attention=True"):
        crosshead.CrossheadBertConfig(add_cross_attention=True, mixers={"talking": {}})


def test_t5_encoder_config_assigns_mixers_to_encoder_part():
    config = crosshead.CrossheadT5Config(is_encoder_decoder=False, mixers={"mixture": {"active_heads": 3}})
    assert config.mixers["encoder"]["mixture"]["active_heads"] == 3
    with pytest.raises(ValueError, match="mixers"):
        crosshead.CrossheadT5Config(is_encoder_decoder=False, mixers={"decoder": 5})
