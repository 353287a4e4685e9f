"""Training image classifiers at toy size: losses, scores, resumed and divided runs, results, refused recipes."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from transformers import AutoModel, AutoModelForImageClassification, ViTConfig, pipeline
from transformers.models.auto.image_processing_auto import AutoImageProcessor

import toys
from crosshead.common.errors import RecipeError
from crosshead.recipes.data.images import ImageInputs, image_processor
from crosshead.recipes.estimate.dry_run import dry_run
from crosshead.recipes.estimate.memory import FSDP, ONE_GPU, Sharding
from crosshead.recipes.schema.recipe import load_recipe
from crosshead.recipes.schema.sections import DataSource
from crosshead.recipes.schema.toy import toy, write_toy_images
from crosshead.recipes.train import train
from crosshead.recipes.trainer.image_objective import keep_numbers, processed_shape
from crosshead.recipes.trainer.models import load_model
from crosshead.recipes.trainer.objectives import objective_of
from image_toys import CLASSIFIER, write_image_model
from toy_training import losses, metrics, resumed, weights

VIT, TRANSNEXT = "small/vit_mixture", "papers/moh_vit_s"
CLASSES = ["0_degrees", "135_degrees", "45_degrees", "90_degrees"]
NO_DROP_PATH = "model.config.drop_path_rate=0"


def toy_recipe(name: str, folder: Path, steps: int = 4, overrides: tuple[str, ...] = (), **train_changes):
    """Return a shipped recipe at toy size; `overrides` are applied before it is made small."""
    recipe = toy(load_recipe(name, overrides), folder)
    settings = {"samples": steps * recipe.per_step} | train_changes
    return replace(recipe, train=replace(recipe.train, **settings), checkpoints=replace(recipe.checkpoints, every=2))


def objective_and_data(recipe):
    """Return the objective, the model at the start of a run, and the data."""
    objective = objective_of(recipe)
    inputs = objective.load_processor()
    model = load_model(recipe, inputs)
    return objective, model, objective.open_data(inputs, model.config, lambda *_: None)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """Recipe and outcome of a run from scratch with drop path and every augmentation."""
    recipe = toy_recipe(TRANSNEXT, tmp_path_factory.mktemp("whole"))
    return recipe, train(recipe)


def test_resumed_run_has_same_losses_weights_and_scores(finished_run, tmp_path):
    whole, again = finished_run[0], toy_recipe(TRANSNEXT, tmp_path)
    resumed(again, 1, 3)
    assert len(losses(whole)) == 4 and losses(again) == losses(whole)
    expected, result = weights(whole), weights(again)
    assert result.keys() == expected.keys() and all(torch.equal(result[name], expected[name]) for name in expected)
    scores = [{key: metrics(each)[-1][key] for key in ("eval_loss", "eval_accuracy")} for each in (whole, again)]
    assert scores[0] == scores[1]


def test_result_loads_with_image_processor_and_class_names(finished_run):
    recipe, outcome = finished_run
    model = AutoModelForImageClassification.from_pretrained(outcome.model).eval()
    assert type(model).__name__ == "CrossheadTransNextForImageClassification"
    assert [model.config.id2label[number] for number in range(4)] == CLASSES
    assert model.config.label2id["45_degrees"] == 2
    processor = AutoImageProcessor.from_pretrained(outcome.model)
    image = Image.open(Path(recipe.data.sources[0].path, "0_degrees", "0.png")).convert("RGB")
    (best, *_) = pipeline("image-classification", model=model, image_processor=processor)(image, top_k=4)
    logits = model(**processor(image, return_tensors="pt")).logits
    assert best["label"] == CLASSES[int(logits.argmax())]
    assert json.loads((outcome.model / "training.json").read_text())["metrics"] == outcome.metrics


@torch.no_grad()
def test_eval_scores_equal_saved_model_on_held_out_images(finished_run):
    recipe, outcome = finished_run
    model = AutoModelForImageClassification.from_pretrained(outcome.model).eval()
    processor = AutoImageProcessor.from_pretrained(outcome.model)
    (held_out,) = objective_and_data(recipe)[2].evaluation._samples.datasets
    total, right = 0.0, 0
    for index in held_out.indices:
        path = Path(held_out.source.place(index))
        logits = model(**processor(Image.open(path).convert("RGB"), return_tensors="pt")).logits[0]
        label = CLASSES.index(path.parent.name)
        total -= float(logits.log_softmax(0)[label])
        right += int(logits.argmax()) == label
    assert len(held_out) >= 2
    assert outcome.metrics["eval_loss"] == pytest.approx(total / len(held_out), rel=1e-4)
    assert outcome.metrics["eval_accuracy"] == pytest.approx(right / len(held_out))


def test_first_loss_is_soft_target_loss_plus_balance_loss(tmp_path):
    recipe = toy_recipe(TRANSNEXT, tmp_path, steps=2, overrides=(NO_DROP_PATH,))
    objective, model, data = objective_and_data(recipe)
    samples = data.samples(recipe.steps * recipe.batch_size, recipe.train.seed)
    batch = objective.collator([samples[number] for number in range(recipe.batch_size)])
    expected = 0.0
    for row in range(recipe.batch_size):
        out = model(batch["pixel_values"][row : row + 1], output_head_router_scores=True)
        share = float(batch["shares"][row])
        target = torch.full((4,), 0.1 / 4)
        target[batch["labels"][row]] += 0.9 * share
        target[batch["other_labels"][row]] += 0.9 * (1 - share)
        loss = -(target * out.logits[0].log_softmax(0)).sum() + 0.01 * out.balance_loss
        expected += loss.item()
    assert train(recipe).steps == 2
    assert losses(recipe)[0] == pytest.approx(expected / recipe.batch_size, rel=1e-4)


def test_losses_do_not_depend_on_micro_batch_size(tmp_path):
    whole, divided = (toy_recipe(VIT, tmp_path / str(size), steps=2, micro_batch=size) for size in (4, 2))
    for recipe in (whole, divided):
        train(recipe)
    assert losses(divided) == pytest.approx(losses(whole), rel=1e-5)


@pytest.mark.slow
def test_losses_do_not_depend_on_data_workers(tmp_path):
    alone, helped = (toy_recipe(VIT, tmp_path / str(count), steps=2) for count in (0, 2))
    for recipe in (alone, replace(helped, data=replace(helped.data, workers=2))):
        train(recipe)
    assert losses(helped) == losses(alone)


@pytest.mark.slow
def test_image_classifier_learns_toy_images(tmp_path):
    changes = ("objective={name: classes, crop: 0.5, flip: false}", "train.learning_rate=2e-3")
    outcome = train(toy_recipe(VIT, tmp_path, steps=150, overrides=changes, micro_batch=4))
    assert outcome.metrics["eval_accuracy"] > 0.9 and outcome.metrics["eval_loss"] < 0.3


def write_recipe(tmp_path: Path, task: str = CLASSIFIER, objective: dict | None = None, **changes) -> Path:
    """Write the recipe of a run that continues a model with three classes on data with four; return its path."""
    write_image_model(tmp_path / "model", task=task, **changes)
    write_toy_images(tmp_path / "images")
    path = tmp_path / "recipe.yaml"
    content = {
        "output": str(tmp_path / "out"),
        "model": {"path": str(tmp_path / "model")},
        "objective": {"name": "classes"} | (objective or {}),
        "data": {"sources": [{"path": str(tmp_path / "images"), "kind": "images"}], "cache": str(tmp_path / "cache")},
        "train": {"learning_rate": 1e-3, "samples": 8, "batch_samples": 4, "dtype": "float32"},
    }
    path.write_text(json.dumps(content))
    return path


def test_continued_model_gets_class_names_of_data(tmp_path):
    outcome = train(load_recipe(write_recipe(tmp_path, num_labels=4)))
    model = AutoModelForImageClassification.from_pretrained(outcome.model)
    assert list(model.config.id2label.values()) == CLASSES


@pytest.mark.parametrize("names", [CLASSES[::-1], ["a", "b", "c", "d"]])
def test_continued_model_keeps_numbers_of_known_classes(names, tmp_path):
    classes = {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    _, model, data = objective_and_data(load_recipe(write_recipe(tmp_path, num_labels=4, **classes)))
    known = names if set(names) == set(CLASSES) else CLASSES
    assert [model.config.id2label[number] for number in range(4)] == known
    source = data.sources[0].source
    assert {Path(source.place(index)).parent.name: label for index, label in enumerate(source.labels)} == {
        name: number for number, name in enumerate(known)
    }


def test_folders_named_by_class_numbers_get_class_names():
    numbers, names = sorted(map(str, range(11))), [f"name {number}" for number in range(11)]
    source = SimpleNamespace(classes=tuple(numbers), labels=list(range(11)))
    keep_numbers(ImageInputs(None, 3, (source,), ()), names)
    assert source.labels == [int(number) for number in numbers] and source.classes == tuple(names)


def test_mismatched_number_of_classes_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"num_labels=3\b.*\b4\b"):
        train(load_recipe(write_recipe(tmp_path)))
    scratch = toy_recipe(VIT, tmp_path / "scratch")
    config = scratch.model.config | {"num_labels": 5}
    with pytest.raises(RecipeError, match=r"model\.config\b.*num_labels=5\b.*\b4\b"):
        train(replace(scratch, model=replace(scratch.model, config=config, path=None)))
    with pytest.raises(RecipeError, match=r"model\.path\b.*num_labels=4\b.*model\.config\b.*\b5\b"):
        train(replace(scratch, model=replace(scratch.model, config=config)))


@pytest.mark.parametrize(
    ("task", "number"),
    [(CLASSIFIER, 3), (CLASSIFIER, 4), ("Model", 3)],
    ids=["other number of classes", "other classes", "none"],
)
def test_new_classifier_replaces_stored_one_and_keeps_backbone(task, number, tmp_path):
    recipe = load_recipe(write_recipe(tmp_path, task, {"new_classifier": True}, num_labels=number))
    _, model, _ = objective_and_data(recipe)
    source = AutoModel.from_pretrained(tmp_path / "model", add_pooling_layer=False)
    for name, part in source.named_parameters():
        assert torch.equal(part, model.vit.get_parameter(name)), name
    assert torch.equal(model.classifier.weight, objective_and_data(recipe)[1].classifier.weight)  # from the seed
    assert model.classifier.bias.eq(0).all() and 0 < model.classifier.weight.std() < 0.05
    finished = AutoModelForImageClassification.from_pretrained(train(recipe).model)
    assert list(finished.config.id2label.values()) == CLASSES
    assert finished.classifier.weight.shape == (4, source.config.hidden_size)


def test_dry_run_counts_new_classifier(tmp_path):
    recipe = toy_recipe(VIT, tmp_path, overrides=("objective.new_classifier=true",))
    reports = []
    for number in (4, 7):
        config = recipe.model.config | {"num_labels": number}
        reports.append(dry_run(replace(recipe, model=replace(recipe.model, config=config)), ONE_GPU))
    assert reports[1]["parameters"] - reports[0]["parameters"] == 3 * (recipe.model.config["hidden_size"] + 1)


def test_dry_run_counts_classes_of_data_for_new_classifier(tmp_path):
    recipe = load_recipe(write_recipe(tmp_path, CLASSIFIER, {"new_classifier": True}, num_labels=7))
    report = dry_run(recipe, ONE_GPU)
    assert report["classes"] == len(CLASSES)
    assert report["parameters"] == sum(part.numel() for part in objective_and_data(recipe)[1].parameters())


def test_new_classifier_from_scratch_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"new_classifier=true"):
        load_recipe(VIT, ("model.path=null", "objective={name: classes, new_classifier: true}"))


def test_model_without_classifier_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"model\.path=.*\b2\b.*classifier.*objective\.new_classifier=true"):
        train(load_recipe(write_recipe(tmp_path, "Model", num_labels=4)))


def test_mismatched_or_broken_image_processor_is_refused(tmp_path):
    recipe = load_recipe(write_recipe(tmp_path, num_labels=4))
    path = tmp_path / "model" / "preprocessor_config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"size": {"height": 20, "width": 20}}))
    with pytest.raises(RecipeError, match=r"\[3, 20, 20\].*\[3, 16, 16\]"):
        train(recipe)
    path.write_text("{")
    with pytest.raises(RecipeError, match=r"model\.path="):
        train(recipe)


def test_mismatched_image_channels_are_refused():
    processor, config = image_processor(16, 3), ViTConfig(**(toys.IMAGE_SIZES | {"num_channels": 1}))
    with pytest.raises(RecipeError, match=r"\[3, 16, 16\].*\[1, 16, 16\]"):
        processed_shape(processor, config, "here")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("train.micro_batch=1", "micro_batch=1 is odd"),
        ("data.sources=[{path: here, kind: text}]", "kind='text' has no data for the objective classes"),
        ("data.sources=[{path: here, kind: hub, streaming: true}]", "streaming=True of the source here has no effect"),
        ("train.tokens=100", "the objective classes counts samples"),
        ("model.tokenizer=gpt2", "model.tokenizer is for the objective next_token alone"),
        ("objective.mixup=-1", "objective.mixup='-1'"),
        ("objective.crop=0", "objective.crop='0'"),
        ("model.config.depths=[1, 0, 1, 1]", "depths"),
        ("model.config.drop_path_rate=2", "drop_path_rate=2"),
        ("model.config.model_type=crosshead_llama", "cannot train a model of model_type='crosshead_llama'"),
    ],
)
def test_invalid_image_recipes_are_refused(change, words):
    with pytest.raises(RecipeError, match=words):
        load_recipe(TRANSNEXT, [change])


def test_dry_run_counts_flops_and_memory_of_vit(tmp_path):
    recipe = toy_recipe(VIT, tmp_path, overrides=("model.config.mixers={}", "model.path="))
    report = dry_run(recipe, ONE_GPU)
    patches, width, inner, layers = 16, 48, 64, 4
    tokens = patches + 1
    forward = patches * width * 3 * 16**2 + width * 4  # the patches and the classifier
    forward += layers * (4 * tokens * width**2 + 2 * tokens**2 * width + 2 * tokens * width * inner)
    assert report["training_flops_per_sample"] == 3 * 2 * forward
    assert report["training_flops"] == 16 * 6 * forward and report["samples_per_step"] == 4
    assert "kv_bytes_per_token" not in report and report["memory_per_gpu"]["activations"] > 0
    sharded = dry_run(recipe, Sharding("two", FSDP, 2))["memory_per_gpu"]
    assert 0 < sharded["weights"] < report["memory_per_gpu"]["weights"]


def test_dry_run_takes_missing_num_labels_from_data(tmp_path):
    recipe = toy_recipe(VIT, tmp_path, overrides=("model.path=",))
    config = {name: value for name, value in recipe.model.config.items() if name != "num_labels"}
    report = dry_run(replace(recipe, model=replace(recipe.model, config=config)), ONE_GPU)
    assert report["classes"] == len(CLASSES) == 4
    assert report["parameters"] == dry_run(recipe, ONE_GPU)["parameters"]


def test_next_token_objective_and_text_columns_refuse_images():
    with pytest.raises(RecipeError, match=r"kind='images'.*next_token"):
        load_recipe("small/smollm2_mixture", ["data.sources=[{path: here, kind: images}]"])
    with pytest.raises(RecipeError, match="column='image'"):
        DataSource("here", "images", column="image")
