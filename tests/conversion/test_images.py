"""Conversions of ViT, DeiT and DINOv2: round trips, routers fitted to images, and refused requests."""

import builtins
import json

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForImageClassification

import crosshead
import toys
from crosshead.common.errors import ConversionError
from crosshead.conversion.calibration.images import RANDOM_NAME
from crosshead.conversion.calibration.streamed import stream
from crosshead.conversion.sources.safetensors_store import SafetensorsStore
from image_toys import CLASSIFIER, IMAGE_BACKBONES, IMAGES, write_image_model, write_images
from tiers import grid

NEUTRAL = {
    "knocking": {"form": "linear", "on": ["query", "key", "value"]},
    "talking": {},
    "explicit": {"norm": False},
    "gating": {},
    "mixture": {"active_heads": 4, "method": "paper", "gate": "binary"},
    "mixture of all heads": {"active_heads": 4},
}
PAPER = {"active_heads": 2, "method": "paper"}


def outputs(folder, auto_class=AutoModelForImageClassification):
    with torch.no_grad():
        result = auto_class.from_pretrained(folder, attn_implementation="eager").eval()(IMAGES)
    return result["last_hidden_state" if auto_class is AutoModel else "logits"]


@pytest.mark.oldest
@pytest.mark.parametrize(
    ("backbone", "task", "name"), grid(IMAGE_BACKBONES, ("Model", CLASSIFIER), NEUTRAL, strength=1)
)
def test_neutral_conversion_and_fold_round_trip(backbone, task, name, tmp_path):
    auto_class = getattr(transformers, "AutoModel" + task.removeprefix("Model"))
    source = write_image_model(tmp_path / "source", backbone, task)
    report = crosshead.convert(source, tmp_path / "made", {name.split()[0]: NEUTRAL[name]})
    measured = report["verification"]
    assert measured["must_equal"] and measured["sample"]["text"] == RANDOM_NAME and measured["images"] == 8
    assert measured["reload"]["greatest_logit_difference"] < 1e-5 and measured["kv_bytes_per_token_after"] == 0
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert config["architectures"] == [f"Crosshead{backbone}{task}"]
    assert torch.equal(outputs(tmp_path / "made", auto_class), outputs(source, auto_class))
    made, file = tmp_path / "made", "preprocessor_config.json"
    assert (made / file).read_bytes() == (source / file).read_bytes()
    crosshead.fold(tmp_path / "made", tmp_path / "back")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert type(auto_class.from_pretrained(tmp_path / "back")).__name__ == f"{backbone}{task}"
    verified = crosshead.verify(source, tmp_path / "made")["verification"]
    difference = "greatest_hidden_difference" if task == "Model" else "greatest_logit_difference"
    assert verified[difference] == 0 and verified.get("class_agreement", 1) == 1


def test_dinov2_swiglu_round_trip(tmp_path):
    """Giant DINOv2 checkpoints store two projections of the gated linear unit as one tensor."""
    source = write_image_model(tmp_path / "source", "Dinov2", use_swiglu_ffn=True)
    report = crosshead.convert(source, tmp_path / "made", {"knocking": {"form": "linear"}})
    assert report["verification"]["must_equal"]
    assert torch.equal(outputs(tmp_path / "made"), outputs(source))
    crosshead.fold(tmp_path / "made", tmp_path / "back", verify=False)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def test_trained_linear_knocking_folds_into_projections(tmp_path):
    source = write_image_model(tmp_path / "source")
    crosshead.convert(source, tmp_path / "made", {"knocking": {"form": "linear"}}, verify=False)
    model = toys.lopsided(AutoModelForImageClassification.from_pretrained(tmp_path / "made"))
    model.save_pretrained(tmp_path / "made")
    report = crosshead.fold(tmp_path / "made", tmp_path / "back")
    assert report["verification"]["must_equal"] and report["counts"]["rewritten"] == 4
    assert torch.allclose(outputs(tmp_path / "back"), outputs(tmp_path / "made"), atol=1e-4)
    assert not torch.allclose(outputs(tmp_path / "back"), outputs(source), atol=1e-2)


def test_fewer_component_heads_give_similar_outputs(tmp_path):
    source = write_image_model(tmp_path / "source", "DeiT")
    mixers = {"explicit": {"key_heads": 4, "value_heads": 3, "norm": False, "method": "svd"}}
    measured = crosshead.convert(source, tmp_path / "made", mixers)["verification"]
    assert not measured["must_equal"] and 0.5 < measured["token_cosine"] < 1 and measured["kl_divergence"] > 0


def test_active_heads_can_differ_per_layer(tmp_path):
    """Fewer active heads in shallow layers, as in the paper."""
    source = write_image_model(tmp_path / "source")
    mixers = {"mixture": {"active_heads": "50%+75%", "method": "paper", "router": "two_stage"}}
    crosshead.convert(source, tmp_path / "made", mixers)
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "made").eval()
    assert model.config.mixers["mixture"]["active_heads"] == [2, 3]
    with torch.no_grad():
        scores = model(IMAGES, output_head_router_scores=True).head_router_scores
        heads = [layer.attention.mixers["mixture"](IMAGES.new_ones(1, 5, 32), None)[0] for layer in model.vit.layers]
    assert len(scores) == 2
    assert [gates.count_nonzero(-1).unique().tolist() for gates in heads] == [[2], [3]]


@pytest.mark.oldest
@pytest.mark.parametrize("backbone", ["ViT", "Dinov2"])
def test_fitted_router_has_higher_cosine_than_paper_router(backbone, tmp_path):
    source, images = write_image_model(tmp_path / "source", backbone), write_images(tmp_path / "images")
    budget = {"active_heads": [2, 3]}
    report = crosshead.convert(source, tmp_path / "fitted", {"mixture": budget}, calibration=images)
    assert report["calibration"]["images"] == "images" and len(report["calibration"]["sha256"]) == 64
    paper = {"mixture": budget | {"method": "paper"}}
    crosshead.convert(source, tmp_path / "paper", paper)
    cosines = [
        crosshead.verify(source, tmp_path / name, text=images)["verification"]["token_cosine"]
        for name in ("fitted", "paper")
    ]
    assert cosines[0] > cosines[1]


def test_images_of_many_channels_are_not_cut_like_windows(tmp_path):
    source = write_image_model(tmp_path / "source", num_channels=40)
    report = crosshead.convert(source, tmp_path / "made", {"talking": {}})
    assert report["verification"]["greatest_logit_difference"] == 0


@pytest.mark.parametrize("backbone", IMAGE_BACKBONES)
def test_streamed_model_gives_same_hidden_states(backbone, tmp_path):
    source = write_image_model(tmp_path / "source", backbone, "Model")
    config = transformers.AutoConfig.from_pretrained(source)
    streamed = stream(SafetensorsStore(source), config, attn_implementation="eager")
    with torch.no_grad(), streamed.head() as head:
        assert torch.equal(head(streamed.run(IMAGES)), outputs(source, AutoModel))


@pytest.mark.parametrize(
    ("task", "mixers", "options", "message"),
    [
        (CLASSIFIER, {"mixture": {"active_heads": 2}}, {}, "--calibration"),
        (CLASSIFIER, {"mixture": {"active_heads": 2}}, {"calibration": "empty"}, "empty"),
        (CLASSIFIER, {"mixture": {"active_heads": 2}}, {"calibration": "missing"}, "missing"),
        (CLASSIFIER, {"mixture": {"active_heads": 2}}, {"calibration": "broken"}, "broken/0.png"),
        (CLASSIFIER, {"mixture": PAPER}, {"calibration": "empty"}, "--calibration"),
        ("ForMaskedImageModeling", {"knocking": {}}, {}, "ViTForMaskedImageModeling"),
    ],
)
def test_invalid_requests_are_refused(task, mixers, options, message, tmp_path):
    source = write_image_model(tmp_path / "source", task=task)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "0.png").write_bytes(b"no image")
    options = {key: tmp_path / value if key == "calibration" else value for key, value in options.items()}
    with pytest.raises(ConversionError, match=message) as caught:
        crosshead.convert(source, tmp_path / "made", mixers, **options)
    assert "\n" not in str(caught.value) and not (tmp_path / "made").exists()


def test_deit_with_teacher_is_refused(tmp_path):
    source = write_image_model(tmp_path / "source", "DeiT", "ForImageClassificationWithTeacher")
    with pytest.raises(ConversionError, match=r"DeiTForImageClassificationWithTeacher.*DeiTForImageClassification"):
        crosshead.convert(source, tmp_path / "made", {"knocking": {}})


def test_missing_pillow_names_pip_install(tmp_path, monkeypatch):
    source, images = write_image_model(tmp_path / "source"), write_images(tmp_path / "images", 2)
    imported = builtins.__import__

    def without_pillow(name, *arguments, **options):
        if name.partition(".")[0] == "PIL":
            raise ImportError(name)
        return imported(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_pillow)
    with pytest.raises(ConversionError, match="pip install pillow"):
        crosshead.convert(source, tmp_path / "made", {"mixture": {"active_heads": 2}}, calibration=images)


def test_image_with_too_many_pixels_is_not_decoded(tmp_path, monkeypatch):
    source, folder = write_image_model(tmp_path / "source"), tmp_path / "images"
    folder.mkdir()
    Image.new("1", (12000, 12000)).save(folder / "large.png")
    monkeypatch.setattr(Image.Image, "convert", None)
    with pytest.raises(ConversionError, match=r"large\.png cannot be read: it has 12,000 x 12,000 pixels"):
        crosshead.convert(source, tmp_path / "made", {"mixture": {"active_heads": 2}}, calibration=folder)


def test_mismatched_or_missing_image_processor_is_refused(tmp_path):
    source = write_image_model(tmp_path / "source")
    file = source / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"size": {"height": 8, "width": 8}}))
    crosshead.convert(source, tmp_path / "made", {"knocking": {}})
    with pytest.raises(ConversionError, match=r"\[3, 8, 8\].*\[3, 16, 16\]"):
        crosshead.verify(source, tmp_path / "made", text=write_images(tmp_path / "images", 2))
    file.unlink()
    with pytest.raises(ConversionError, match=file.name):
        crosshead.convert(source, tmp_path / "other", {"knocking": {}})
