"""A teacher's logits on disk: saving them, and distillation from them as from the teacher itself."""

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, OPTConfig

from broken import run as run_command
from crosshead.common.errors import RecipeError
from crosshead.recipes.data.training_data import open_data
from crosshead.recipes.schema.recipe import load_recipe
from crosshead.recipes.schema.toy import toy
from crosshead.recipes.trainer import teacher_logits as module
from crosshead.recipes.trainer.loading import initial_config, load_tokenizer
from crosshead.recipes.trainer.teacher_logits import INDICES, LOG_PROBS, WithTeacher, run_key, save_teacher
from toy_checkpoints import write_stock
from toy_training import KNOCKING, MIXTURE, killed, losses, resumed, toy_run, train, weights


@pytest.fixture
def recipe(tmp_path):
    return toy_run(MIXTURE, tmp_path)


@pytest.fixture(scope="module")
def saved_logits(tmp_path_factory):
    """A recipe with a teacher, and the folder of the teacher's saved logits."""
    folder = tmp_path_factory.mktemp("saved")
    recipe = toy_run(MIXTURE, folder)
    save_teacher(recipe, folder / "logits")
    return recipe, folder / "logits"


@pytest.fixture
def recipe_with_logits(saved_logits, tmp_path):
    """A recipe that distils from a copy of the saved logits, with an output folder of its own."""
    recipe, logits = saved_logits
    shutil.copytree(logits, tmp_path / "logits")
    return replace(from_disk(recipe, tmp_path / "logits"), output=str(tmp_path / "from-disk"))


def from_disk(recipe, folder, name="from-disk", **changes):
    """Return the recipe with saved logits instead of a teacher."""
    distillation = replace(recipe.distillation, **{"teacher": None, "logits": str(folder), "match_steps": 0} | changes)
    return replace(recipe, distillation=distillation, output=str(Path(recipe.output).with_name(name)))


def samples_of(recipe):
    data = open_data(recipe.data, load_tokenizer(recipe), initial_config(recipe).vocab_size)
    return data, data.samples(recipe.steps * recipe.batch_size, recipe.train.seed)


def with_teacher(recipe):
    data, samples = samples_of(recipe)
    return WithTeacher(samples, recipe.distillation, run_key(recipe, data), initial_config(recipe).vocab_size)


@torch.no_grad()
def test_saved_logits_are_highest_log_probs_of_teacher(recipe, tmp_path):
    reports = []
    save_teacher(recipe, tmp_path / "logits", lambda *progress: reports.append(progress))
    stored = with_teacher(from_disk(recipe, tmp_path / "logits"))
    teacher = AutoModelForCausalLM.from_pretrained(recipe.distillation.teacher)
    _, samples = samples_of(recipe)
    assert len(stored) == len(samples) == 16
    for index, sample in enumerate(samples):
        item = stored[index]
        assert all(torch.equal(item[name], sample[name]) for name in sample)
        expected = teacher(sample["input_ids"][None]).logits[0].log_softmax(-1).topk(64)
        torch.testing.assert_close(item[LOG_PROBS].float(), expected.values, rtol=1e-3, atol=0)
        chosen = teacher(sample["input_ids"][None]).logits[0].log_softmax(-1).gather(-1, item[INDICES])
        torch.testing.assert_close(chosen, expected.values)  # the same tokens, but for the order of equal ones
    assert [progress for progress in reports if progress[0] == "teacher"] == [
        ("teacher", done, 16) for done in range(2, 17, 2)
    ]


def test_losses_from_complete_saved_logits_equal_live_teacher(recipe, tmp_path, monkeypatch):
    train(recipe)
    monkeypatch.setattr(module, "HIGHEST", 1000)
    save_teacher(recipe, tmp_path / "logits")
    stored = from_disk(recipe, tmp_path / "logits")
    train(stored)
    assert losses(stored) == pytest.approx(losses(recipe), abs=2e-3)  # logits are stored in half precision
    assert losses(stored) != losses(recipe)


def test_resumed_run_from_saved_logits_is_bitwise_equal(recipe_with_logits, tmp_path):
    whole, killed = (replace(recipe_with_logits, output=str(tmp_path / name)) for name in ("whole", "killed"))
    train(whole)
    resumed(killed, 1, 3)
    assert losses(killed) == losses(whole)
    result, expected = weights(killed), weights(whole)
    assert all(torch.equal(result[name], expected[name]) for name in expected)


def test_resume_with_logits_of_another_teacher_is_refused(recipe_with_logits, tmp_path):
    killed(recipe_with_logits, 3)
    record = tmp_path / "logits" / "logits.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"teacher": "another"}))
    with pytest.raises(RecipeError, match=r"weights of distillation\.logits=.*'another'"):
        train(recipe_with_logits)


def test_shorter_run_can_use_saved_logits(recipe_with_logits):
    shorter = replace(
        recipe_with_logits, train=replace(recipe_with_logits.train, tokens=2 * recipe_with_logits.train.batch_tokens)
    )
    assert train(shorter).steps == 2


def longer_run(recipe):
    return replace(recipe, train=replace(recipe.train, tokens=9 * recipe.train.batch_tokens))


def edit_record(**changes):
    def edit(folder):
        path = folder / "logits.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


@pytest.mark.parametrize(
    ("damage", "change", "words"),
    [
        (None, longer_run, r"16 samples.*36"),
        (None, lambda recipe: replace(recipe, train=replace(recipe.train, seed=7)), r"seed=0.*7"),
        (None, lambda recipe: replace(recipe, data=replace(recipe.data, length=32)), "on other data"),
        (None, lambda recipe: from_disk(recipe, "nowhere"), r"distillation\.logits=nowhere"),
        (edit_record(vocabulary=1000), None, "1000 tokens.*257"),
        (edit_record(shape=[99, 64, 64]), None, r"distillation\.logits="),
        (edit_record(shape=None), None, r"distillation\.logits="),
        (lambda folder: (folder / "logits.json").write_text("{"), None, r"distillation\.logits="),
        (lambda folder: (folder / "logits.json").write_text("[]"), None, r"distillation\.logits="),
        (lambda folder: (folder / "indices").write_bytes(b"1234"), None, r"distillation\.logits="),
    ],
)
def test_mismatched_or_damaged_logits_are_refused(damage, change, words, recipe_with_logits, tmp_path):
    if damage is not None:
        damage(tmp_path / "logits")
    with pytest.raises(RecipeError, match=words) as caught:
        train(change(recipe_with_logits) if change is not None else recipe_with_logits)
    assert "\n" not in str(caught.value)


def test_saving_logits_with_weight_zero_is_refused(recipe, tmp_path):
    with pytest.raises(RecipeError, match=r"distillation\.weight=0"):
        save_teacher(replace(recipe, distillation=replace(recipe.distillation, weight=0)), tmp_path / "logits")
    assert not (tmp_path / "logits").exists()


def test_saving_logits_into_existing_folder_is_refused(recipe, tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "a.txt").write_text("a")
    with pytest.raises(RecipeError, match="letters"):
        save_teacher(recipe, tmp_path / "letters")
    assert [path.name for path in (tmp_path / "letters").iterdir()] == ["a.txt"]


def test_saving_logits_without_teacher_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"distillation\.teacher"):
        save_teacher(toy_run(KNOCKING, tmp_path), tmp_path / "logits")


def test_saving_logits_of_teacher_with_short_context_is_refused(recipe, tmp_path):
    teacher = str(write_stock(tmp_path / "short", vocab_size=257, max_position_embeddings=32))
    with pytest.raises(RecipeError, match=r"data\.length=64 .*distillation\.teacher=.*short: use at most 32$"):
        save_teacher(replace(recipe, distillation=replace(recipe.distillation, teacher=teacher)), tmp_path / "logits")
    assert not (tmp_path / "logits").exists()


def test_saving_logits_of_teacher_that_mixes_documents_is_refused(recipe, tmp_path):
    shape = OPTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64, vocab_size=257)
    shape.word_embed_proj_dim = 32
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path / "opt")
    options = replace(recipe.distillation, teacher=str(tmp_path / "opt"))
    separate = replace(recipe, distillation=options, data=replace(recipe.data, separate_documents=True))
    with pytest.raises(RecipeError, match=r"data\.separate_documents=true .*distillation\.teacher, a OPTForCausalLM"):
        save_teacher(separate, tmp_path / "logits")
    assert not (tmp_path / "logits").exists()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_interrupted_saving_leaves_no_logits(error, recipe, tmp_path):
    def ends(stage, done, total, message=""):
        if stage == "teacher" and done == 6:
            raise error

    expected = RecipeError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected, match=r"(No space left|^$)"):
        save_teacher(recipe, tmp_path / "logits", ends)
    assert not [path for path in tmp_path.iterdir() if "logits" in path.name]


def test_save_teacher_command_writes_logits_once(recipe, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("crosshead.recipes.schema.toy.toy", lambda *_: recipe)
    command = f"train {MIXTURE} --toy {tmp_path} --save-teacher {tmp_path / 'logits'}"
    assert run_command(capfd, monkeypatch, command)[:2] == (0, f"wrote {tmp_path / 'logits'}\n")
    assert train(from_disk(recipe, tmp_path / "logits")).model
    status, out, err = run_command(capfd, monkeypatch, command)
    assert (status, out) == (1, "") and str(tmp_path / "logits") in err.splitlines()[-1]


@pytest.mark.slow
def test_toy_trains_on_logits_saved_by_toy_command(tmp_path, monkeypatch, capfd):
    logits = tmp_path / "logits"
    command = f"train {MIXTURE} --toy {tmp_path} --set distillation.weight=0.9 --set distillation.transfer_steps=0"
    assert run_command(capfd, monkeypatch, f"{command} --save-teacher {logits}")[0] == 0
    recipe = toy(load_recipe(MIXTURE, [f"distillation={{logits: {logits}}}"]), tmp_path)
    assert recipe.distillation.logits == str(logits) and recipe.distillation.teacher is None
    assert train(recipe).model


def test_second_process_does_not_touch_unfinished_logits(recipe, tmp_path):
    """Two processes for one folder: the second is refused, and the first writes the complete files."""

    def starts_again(stage, done, total, message=""):
        if stage == "teacher" and done == 6:
            with pytest.raises(RecipeError, match=r"another process writes to .*logits"):
                save_teacher(recipe, tmp_path / "logits")

    save_teacher(recipe, tmp_path / "logits", starts_again)
    assert sorted(path.name for path in (tmp_path / "logits").iterdir()) == ["indices", "logarithms", "logits.json"]
    assert not (tmp_path / ".logits.partial").exists()
