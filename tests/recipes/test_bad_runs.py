"""Runs that cannot begin: one clear line each, exit status 1, and nothing is half-written."""

import json
import os
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import crosshead
from broken import run as run_command
from broken import snapshot
from crosshead.common.errors import RecipeError
from crosshead.recipes.schema.toy import toy_config
from crosshead.recipes.trainer import training_arguments
from crosshead.recipes.trainer.checkpoint_trainer import FSDP_MODEL, CheckpointTrainer
from toy_checkpoints import write_stock
from toy_training import KNOCKING, LORA, MIXTURE, toy_run, train

NOWHERE = "/nowhere/models/mine"


@dataclass(frozen=True)
class Case:
    """A change that makes a run impossible, and words of its one-line error."""

    words: str
    change: Any
    """Function of the recipe and its folder that returns the changed recipe."""
    name: str = KNOCKING


def changed_section(section, **values):
    """Return a change that sets values in one section of the recipe."""
    return lambda recipe, folder: replace(recipe, **{section: replace(getattr(recipe, section), **values)})


def folder_change(act):
    """Return a change that calls `act` with the folder and keeps the recipe."""

    def change(recipe, folder):
        act(folder)
        return recipe

    return change


def edit_json(file, **changes):
    def act(folder):
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return folder_change(act)


def smaller_vocabulary(recipe, folder):
    """Give the model a smaller vocabulary than its tokenizer."""
    config = recipe.model.config | {"vocab_size": 100}
    return replace(recipe, model=replace(recipe.model, path=None, config=config))


def output_is_a_file(recipe, folder):
    (folder / "letter").write_text("")
    return replace(recipe, output=str(folder / "letter"))


def output_below_a_file(recipe, folder):
    (folder / "letter").write_text("")
    return replace(recipe, output=str(folder / "letter" / "run"))


def foreign_model_in_output(recipe, folder):
    (folder / "run" / "model").mkdir(parents=True)
    (folder / "run" / "model" / "config.json").write_text("")
    return recipe


def stock_model_without_mixers(recipe, folder):
    """Use a stock model, in which `trainable: mixers` has nothing to train."""
    write_stock(folder / "stock", vocab_size=257)
    model = replace(recipe.model, path=str(folder / "stock"), config=None)
    return replace(recipe, model=model, train=replace(recipe.train, trainable="mixers"))


def larger_teacher(recipe, folder):
    write_stock(folder / "large", vocab_size=300)
    return replace(recipe, distillation=replace(recipe.distillation, teacher=str(folder / "large")))


def other_teacher(**changes):
    def change(recipe, folder):
        write_stock(folder / "other", **({"vocab_size": 257} | changes))
        return replace(recipe, distillation=replace(recipe.distillation, teacher=str(folder / "other"), match_steps=1))

    return change


def missing_layer(recipe, folder):
    AutoModelForCausalLM.from_config(crosshead.CrossheadLlamaConfig(**small_config())).save_pretrained(
        folder / "model"
    )
    edit_json("model/config.json", num_hidden_layers=3)(recipe, folder)
    return replace(recipe, model=replace(recipe.model, config=None))


def small_config():
    content = {"model_type": "crosshead_llama", "num_hidden_layers": 2, "num_attention_heads": 4, "mixers": {}}
    return {key: value for key, value in toy_config(content, 257).items() if key != "model_type"}


def expecting_config(**values):
    """Return a change that makes model.config contradict the stored model."""
    return lambda recipe, folder: changed_section("model", config=recipe.model.config | values)(recipe, folder)


def write_file(file, content):
    return folder_change(lambda folder: (folder / file).write_text(content))


WEIGHTS = "model/model.safetensors"
CASES = {
    "no model": Case(f"model.path={NOWHERE}", changed_section("model", path=NOWHERE)),
    "a model yet to be made": Case(
        "crosshead fold a b && crosshead convert b c --mixer knocking",
        changed_section(
            "model", path=NOWHERE, convert="crosshead fold a b\ncrosshead convert b c \\\n  --mixer knocking\n"
        ),
    ),
    "its tokenizer, too": Case(f"model.path={NOWHERE}", changed_section("model", path=NOWHERE, tokenizer=None)),
    "no tokenizer": Case(f"model.tokenizer={NOWHERE}", changed_section("model", tokenizer=NOWHERE)),
    "no tokenizer in the model": Case("model.path=", changed_section("model", tokenizer=None)),
    "damaged tokenizer": Case("model.tokenizer=", write_file("tokenizer/tokenizer.json", "{")),
    "other tokenizer": Case("token 256", smaller_vocabulary),
    "damaged config": Case("model.path=", write_file("model/config.json", "{")),
    "other config": Case("intermediate_size=64", expecting_config(intermediate_size=65)),
    "other mixers": Case("mixers={'knocking': {", expecting_config(mixers={})),
    "no weights": Case("model.path=", folder_change(lambda folder: (folder / WEIGHTS).unlink())),
    "cut weights": Case("model.path=", write_file(WEIGHTS, "12345678")),
    "a layer is missing": Case("model.layers.2.", missing_layer),
    "pickled weights": Case(
        "model.path=", folder_change(lambda folder: (folder / WEIGHTS).rename(folder / "model/pytorch_model.bin"))
    ),
    "code of its own": Case(
        "model.path=", edit_json("model/config.json", model_type="x", auto_map={"AutoConfig": "a.B"})
    ),
    "no teacher": Case(f"distillation.teacher={NOWHERE}", changed_section("distillation", teacher=NOWHERE), MIXTURE),
    "larger teacher": Case("300 tokens", larger_teacher, MIXTURE),
    "smaller teacher": Case("100 tokens", other_teacher(vocab_size=100), MIXTURE),
    "deeper teacher": Case("num_hidden_layers=7", other_teacher(num_hidden_layers=7), MIXTURE),
    "wider teacher": Case("hidden_size=", other_teacher(num_hidden_layers=4, hidden_size=64), MIXTURE),
    "teacher with a short context": Case(
        "data.length=64 is above the context of distillation.teacher=",
        other_teacher(max_position_embeddings=32),
        MIXTURE,
    ),
    "no logits": Case(
        f"distillation.logits={NOWHERE}", changed_section("distillation", teacher=None, logits=NOWHERE), MIXTURE
    ),
    "nothing to train": Case("train.trainable='mixers'", stock_model_without_mixers),
    "output is a file": Case("letter", output_is_a_file),
    "output below a file": Case("letter/run", output_below_a_file),
    "a model is there": Case("run.json", foreign_model_in_output),
    "too little text": Case("length=64", write_file("text.jsonl", '{"text": "a"}\n')),
    "no text": Case("text.jsonl", write_file("text.jsonl", "")),
    "unknown tracker": Case("'paper'", changed_section("watch", report_to=("paper",))),
}


@pytest.mark.parametrize("name", CASES)
def test_impossible_run_gives_one_line_error_and_writes_nothing(name, tmp_path, monkeypatch, capfd):
    case = CASES[name]
    recipe = case.change(toy_run(case.name, tmp_path), tmp_path)
    monkeypatch.setattr("crosshead.recipes.schema.toy.toy", lambda *_: recipe)
    before = snapshot(tmp_path)
    status, out, err = run_command(capfd, monkeypatch, f"train {case.name} --toy {tmp_path}")
    assert (status, out) == (1, ""), err
    assert err.startswith("crosshead: error: ") and err.count("\n") == 1, err
    assert case.words in err
    after = {path for path in snapshot(tmp_path) if not path.startswith("tokens")}  # the cache of tokens stays
    assert after - {"run/.lock"} == set(before)


def test_unwritable_cache_is_refused(tmp_path):
    (tmp_path / "letter").write_text("")
    recipe = toy_run(KNOCKING, tmp_path, data={"cache": str(tmp_path / "letter")})
    with pytest.raises(RecipeError, match="letter"):
        train(recipe)


@pytest.mark.parametrize(("processes", "at_once", "fits"), [(1, 4, True), (2, 2, True), (3, 1, False), (2, 4, False)])
def test_accumulation_steps_divide_batch_among_processes(processes, at_once, fits, tmp_path):
    recipe = toy_run(KNOCKING, tmp_path, train={"micro_batch": at_once})
    if fits:
        assert training_arguments.accumulation_steps(recipe, processes) == 4 // (processes * at_once)
        return
    words = f"{processes} processes.*train.micro_batch={at_once}"
    with pytest.raises(RecipeError, match=words):
        training_arguments.accumulation_steps(recipe, processes)


def test_accelerate_use_cpu_selects_cpu_despite_accelerator(tmp_path, monkeypatch):
    """`accelerate launch --cpu` sets the variable, and so does `bench train --device cpu`."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    arguments = training_arguments.training_arguments(toy_run(KNOCKING, tmp_path))
    assert arguments.use_cpu and not arguments.dataloader_pin_memory and arguments.device.type == "cpu"


@pytest.mark.parametrize("set_by_accelerate", ["no", "bf16", "fp16"])
@pytest.mark.parametrize(("dtype", "used"), [("float32", "no"), ("bfloat16", "bf16")])
def test_recipe_dtype_overrides_accelerate_mixed_precision(dtype, used, set_by_accelerate, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", set_by_accelerate)
    arguments = training_arguments.training_arguments(toy_run(KNOCKING, tmp_path, train={"dtype": dtype}))
    assert arguments.mixed_precision == used
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == set_by_accelerate


def test_one_process_on_several_gpus_is_refused_with_launch_command(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: 4))
    with pytest.raises(RecipeError, match="accelerate launch --num_processes 4 -m crosshead train"):
        train(toy_run(KNOCKING, tmp_path))


@pytest.mark.parametrize("kind", ["is_fsdp_enabled", "is_deepspeed_enabled"])
def test_lora_with_sharding_is_refused(kind, tmp_path, monkeypatch):
    initialise = Trainer.__init__

    def sharded(self, **options):
        initialise(self, **options)
        setattr(self, kind, True)

    monkeypatch.setattr(Trainer, "__init__", sharded)
    with pytest.raises(RecipeError, match=r"train\.trainable='mixers\+lora'"):
        train(toy_run(LORA, tmp_path))


def test_fsdp_sharded_state_dict_is_refused(tmp_path, monkeypatch):
    """Reading sharded checkpoints would unpickle arbitrary objects."""
    initialise = Trainer.__init__

    def sharded(self, **options):
        initialise(self, **options)
        self.is_fsdp_enabled = True
        self.accelerator = SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=SimpleNamespace(state_dict_type="SHARDED_STATE_DICT"))
        )

    monkeypatch.setattr(Trainer, "__init__", sharded)
    with pytest.raises(RecipeError, match=r"fsdp_state_dict_type.*FULL_STATE_DICT"):
        train(toy_run(KNOCKING, tmp_path))


@pytest.mark.parametrize("with_fsdp", [True, False])
def test_checkpoint_of_other_sharding_is_refused_and_not_called_damaged(with_fsdp, tmp_path):
    if not with_fsdp:  # the checkpoint has it, the run has not
        (tmp_path / FSDP_MODEL).touch()
    trainer: Any = CheckpointTrainer.__new__(CheckpointTrainer)
    trainer.is_fsdp_enabled = with_fsdp
    with pytest.raises(RecipeError, match=rf"resume with{'' if not with_fsdp else 'out'} it") as caught:
        trainer._check_checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value) and "remove" not in str(caught.value)


def test_teacher_with_zero3_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.integrations.deepspeed.is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(RecipeError, match=r"distillation\.teacher.*ZeRO-3"):
        train(toy_run(MIXTURE, tmp_path))


def test_output_folder_not_shared_by_all_processes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("accelerate.utils.gather_object", lambda steps: [*steps, 7])
    with pytest.raises(RecipeError, match="output="):
        train(toy_run(KNOCKING, tmp_path))
