"""`crosshead eval --data` on a folder of images."""

import json

import pytest
import torch
from PIL import Image
from sklearn.metrics import accuracy_score, log_loss, top_k_accuracy_score
from transformers import AutoModelForImageClassification

import toys
import transnext_toys
from broken import run
from crosshead import CrossheadViTConfig, CrossheadViTForImageClassification
from image_toys import CLASSIFIER, ViTImageProcessorPil, write_image_model
from scoring_toys import write_class_folders


@pytest.fixture
def run_eval(capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def ask(command):
        status, out, err = run(capfd, monkeypatch, f"eval {command} --overwrite")
        assert (status, err) == (0, "")
        return json.loads((tmp_path / "eval.json").read_text()), out

    return ask


def scores(report, model=0):
    return {row["metric"]: row["score"] for row in report["models"][model]["scores"]}


def probabilities_of(folder, files):
    """Return class probabilities (images, classes), computed image by image."""
    processor = ViTImageProcessorPil.from_pretrained(folder)
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    images = [Image.open(file).convert("RGB") for file in files]
    with torch.no_grad():
        return (
            torch.cat([model(**processor(each, return_tensors="pt")).logits for each in images]).double().softmax(-1)
        )


@pytest.mark.parametrize(
    ("backbone", "task"),
    [pytest.param("ViT", CLASSIFIER, marks=pytest.mark.slow), ("DeiT", f"{CLASSIFIER}WithTeacher")],
)
def test_accuracy_top_5_and_loss_match_sklearn(backbone, task, run_eval, tmp_path):
    """Folders are named by class names or class numbers; their order differs from the order of the classes."""
    names = {index: f"kind {7 - index}" for index in range(7)}
    write_image_model(tmp_path / "model", backbone, task, num_labels=7, id2label=names)
    folders = {"kind 1": 6, "kind 2": 5, "kind 5": 2, "3": 3}
    write_class_folders(tmp_path / "images", list(folders), each=6)
    (tmp_path / "images" / "kind 5" / "notes.txt").write_text("no image")
    (tmp_path / "images" / "kind 5" / "folder.png").mkdir()
    report, out = run_eval("model --data images")
    files = sorted(path for path in (tmp_path / "images").rglob("*.png") if path.is_file())
    labels, chances = [folders[file.parent.name] for file in files], probabilities_of(tmp_path / "model", files)
    metrics = scores(report)
    assert metrics["accuracy"] == pytest.approx(accuracy_score(labels, chances.argmax(1)))
    assert metrics["top_5_accuracy"] == pytest.approx(top_k_accuracy_score(labels, chances, k=5, labels=range(7)))
    assert metrics["loss"] == pytest.approx(log_loss(labels, chances, labels=range(7)), rel=1e-4)
    assert {row["items"] for row in report["models"][0]["scores"]} == {24} and "top_5_accuracy" in out
    assert report["models"][0]["context"] is None and report["data"]["name"] == "images"


def test_limit_takes_images_of_every_class(run_eval, tmp_path):
    write_image_model(tmp_path / "model")
    write_class_folders(tmp_path / "images", ["LABEL_0", "LABEL_1", "LABEL_2"], each=4)
    report, _ = run_eval("model --data images --limit 3 --batch-size 2")
    files = [tmp_path / "images" / f"LABEL_{label}" / "0.png" for label in range(3)]
    chances = probabilities_of(tmp_path / "model", files)
    assert scores(report) == {
        "accuracy": pytest.approx(accuracy_score(range(3), chances.argmax(1))),
        "loss": pytest.approx(log_loss(range(3), chances), rel=1e-4),
    }


def test_comparison_of_vit_and_transnext(run_eval, tmp_path):
    """Two models with mechanisms: a ViT and a TransNeXt with larger images."""
    config = CrossheadViTConfig(**toys.IMAGE_SIZES, mixers={"mixture": {"active_heads": 3}})
    toys.lopsided(CrossheadViTForImageClassification(config)).save_pretrained(tmp_path / "vit")
    transnext_toys.model_of(transnext_toys.ROUTED).save_pretrained(tmp_path / "transnext")
    for name, size in (("vit", 16), ("transnext", 64)):
        ViTImageProcessorPil(size={"height": size, "width": size}).save_pretrained(tmp_path / name)
    write_class_folders(tmp_path / "images", ["0", "1", "2"])
    report, _ = run_eval("vit transnext --data images --compare")
    files = sorted((tmp_path / "images").rglob("*.png"))
    for index, name in enumerate(("vit", "transnext")):
        labels, chances = [int(file.parent.name) for file in files], probabilities_of(tmp_path / name, files)
        assert scores(report, index)["loss"] == pytest.approx(log_loss(labels, chances), rel=1e-4)
    (comparison,) = report["compared"]
    assert [row["items"] for row in comparison["scores"]] == [12, 12]
    for row in comparison["scores"]:
        assert row["change"] == pytest.approx(scores(report, 1)[row["metric"]] - scores(report)[row["metric"]])
