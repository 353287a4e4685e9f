"""Recipes from YAML: typed, checked, changed from the command line, and refused in one line."""

import re
from pathlib import Path

import pytest

from crosshead.common.errors import RecipeError
from crosshead.recipes.schema.recipe import json_schema, load_recipe, shipped_recipes

RECIPES = Path(__file__).parents[2] / "recipes"

PATH = "model: {path: somewhere}"
DATA = "data: {sources: [{path: text.txt}], length: 64}"
TRAIN = "train: {learning_rate: 1e-4, tokens: 6400, batch_tokens: 640}"
CONFIG = "model: {tokenizer: somewhere, config: {model_type: crosshead_llama, %s}}"


def write_recipe(folder: Path, *sections: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text("\n".join(["output: run", *sections]), encoding="utf-8")
    return path


def test_values_get_types_of_schema(tmp_path):
    recipe = load_recipe(
        write_recipe(
            tmp_path,
            PATH,
            "data: {sources: [{path: a, weight: 2}, {path: b, kind: jsonl}], length: 64, separate_documents: true}",
            "train: {learning_rate: 1e-4, tokens: 1_000, batch_tokens: 1.28e2, betas: [0.9, 0.99], schedule: cosine}",
            "watch: {report_to: [trackio]}",
            "checkpoints:",
        )
    )
    assert recipe.train.learning_rate == 1e-4 and recipe.train.tokens == 1000 and recipe.train.batch_tokens == 128
    assert recipe.train.betas == (0.9, 0.99) and recipe.data.separate_documents is True
    assert [source.weight for source in recipe.data.sources] == [2.0, 1.0]
    assert recipe.watch.report_to == ("trackio",) and recipe.watch.evaluate_every is None
    assert recipe.checkpoints.keep == 2 and recipe.hub is None


def test_key_on_is_not_read_as_boolean(tmp_path):
    mixers = "mixers: {knocking: {on: [value], form: linear}, explicit: {norm: false}}, rms_norm_eps: 1e-5"
    recipe = load_recipe(write_recipe(tmp_path, CONFIG % mixers, DATA, TRAIN))
    assert recipe.model.config == {
        "model_type": "crosshead_llama",
        "mixers": {"knocking": {"on": ["value"], "form": "linear"}, "explicit": {"norm": False}},
        "rms_norm_eps": 1e-5,
    }


@pytest.mark.parametrize(("warmup", "steps"), [("0", 0), ("0.05", 5), ("1", 1), ("30", 30)])
def test_steps_and_warmup_are_derived_from_tokens(tmp_path, warmup, steps):
    recipe = load_recipe(write_recipe(tmp_path, PATH, DATA, TRAIN), ["train.tokens=63_361", f"train.warmup={warmup}"])
    assert (recipe.batch_size, recipe.steps, recipe.warmup_steps) == (10, 100, steps)


def test_command_line_overrides_any_key(tmp_path):
    path = write_recipe(tmp_path, CONFIG % "mixers: {mixture: {active_heads: 4}}", DATA, TRAIN)
    changes = [
        "train.learning_rate=1e-5",
        "data.sources.0.weight=3",
        "watch.report_to=[trackio, tensorboard]",
        "model.config.mixers.mixture.shared_heads=1",
        "hub.repo=me/model",
        "data.sources.0.path=a=b",
    ]
    recipe = load_recipe(path, changes)
    assert recipe.train.learning_rate == 1e-5
    assert recipe.data.sources[0].weight == 3.0 and recipe.data.sources[0].path == "a=b"
    assert recipe.watch.report_to == ("trackio", "tensorboard")
    assert recipe.model.config["mixers"] == {"mixture": {"active_heads": 4, "shared_heads": 1}}
    assert recipe.hub.repo == "me/model"
    assert load_recipe(path, ["model.config.mixers={}"]).model.config["mixers"] == {}


def test_shipped_recipe_loads_by_name():
    assert load_recipe("small/smollm2_knocking") == load_recipe(RECIPES / "small/smollm2_knocking.yaml")
    assert load_recipe("small/smollm2_knocking.yaml").output == "runs/smollm2_knocking"
    assert len(shipped_recipes()) == len(list(RECIPES.glob("papers/*"))) + len(list(RECIPES.glob("small/*")))


def test_readme_example_loads(tmp_path):
    (example,) = re.findall(r"```yaml\n(output.*?)```", (RECIPES / "README.md").read_text(), re.DOTALL)
    path = tmp_path / "example.yaml"
    path.write_text(example)
    assert load_recipe(path).steps == 306


BAD_FILES = {
    "no section": ([DATA, TRAIN], "'model'"),
    "no key": ([PATH, DATA, "train: {tokens: 10}"], "'learning_rate'"),
    "a key twice": (
        [PATH, DATA, TRAIN, "output: there"],
        "line 5, column 1",
    ),
    "no YAML": ([PATH, DATA, TRAIN, "watch: {"], "YAML"),
    "a loop": ([PATH, DATA, TRAIN, "watch: &watch {every: *watch}"], "YAML"),
    "nothing to train": (["model: {tokenizer: a}", DATA, TRAIN], "model.path"),
    "nothing to read with": (["model: {config: {model_type: crosshead_llama}}", DATA, TRAIN], "model.tokenizer"),
    "an unknown model": ([CONFIG.replace("llama", "lama") % "", DATA, TRAIN], "'crosshead_llama'"),
    "an unknown size": ([CONFIG % "hiden_size: 8", DATA, TRAIN], "'hiden_size'"),
    "a wrong size": ([CONFIG % "hidden_size: wide", DATA, TRAIN], "hidden_size"),
    "no heads": ([CONFIG % "num_attention_heads: 0", DATA, TRAIN], "num_attention_heads=0"),
    "windows beyond its positions": (
        [CONFIG % "max_position_embeddings: 63", DATA, TRAIN],
        "max_position_embeddings=63",
    ),
    "a wrong mechanism": ([CONFIG % "mixers: {mixture: {active_heads: 99}}", DATA, TRAIN], "active_heads=99"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_invalid_recipe_files_are_refused(tmp_path, case):
    sections, message = BAD_FILES[case]
    assert_refused(write_recipe(tmp_path, *sections), [], message)


def assert_refused(path, changes, message):
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


BAD_VALUES = {
    "wath.every=1": "'wath'",
    "train.lerning_rate=1": "'lerning_rate'",
    "train.label_smoothing=0.1": "'label_smoothing'",
    "data.sources.0.pth=a": "'pth'",
    "data.sources.0.kind=txt": "data.sources.0.kind='txt'",
    "data.sources=[]": "data.sources=[]",
    "data.length=1": "data.length='1'",
    "data.held_out=1": "data.held_out='1'",
    "train.seed=": "train.seed=None",
    "train.betas=[0.9, 0.9, 0.9]": "train.betas=['0.9', '0.9', '0.9']: input should have at most 2 entries",
    "train.lora={rank: 4, alpha: 8, droput: 0}": "train.lora has no key 'droput': did you mean 'dropout'",
    "data.evaluation=[{path: a, colum: b}]": "data.evaluation.0 has no key 'colum': did you mean 'column'",
    "train.learning_rate=fast": "train.learning_rate='fast'",
    "train.learning_rate=1e999": "train.learning_rate='1e999'",
    "train.learning_rate=0": "train.learning_rate='0'",
    "train.learning_rate=": "train.learning_rate=None",
    "data.evaluation=[{path: a, weight: 5}]": "data.evaluation has weight=5, which has no effect there",
    "train.tokens=0.5": "train.tokens='0.5'",
    "train.tokens=15e-1": "train.tokens='15e-1'",
    "train.final_ratio=2": "train.final_ratio='2'",
    "train.checkpoint_activations=1": "train.checkpoint_activations=1",
    "train.trainable=mixer": "train.trainable='mixer'",
    "train.betas=[0.9]": "train.betas=['0.9']: input should have at least 2 entries",
    "train=hard": "train='hard'",
    "model.path=[a]": "model.path=['a']",
    "model.config=llama": "model.config='llama'",
    "output=": "output=None",
    "watch.report_to=trackio": "watch.report_to='trackio'",
    "train.batch_tokens=650": "640",
    "train.batch_tokens=6": "train.batch_tokens=6",
    "train.micro_batch=4": "train.micro_batch=4",
    "train.warmup=10": "train.warmup=10",
    "train.warmup=1.5": "train.warmup=1.5",
    "train.warmup_from=1": "train.warmup_from=1.0",
    "train.lora={rank: 4, alpha: 8, dropout: 1}": "train.lora.dropout='1'",
    "data.workers=100000": "data.workers='100000'",
    "train.trainable=mixers+lora": "train.trainable='mixers+lora'",
    "train.lora={rank: 4, alpha: 8}": "train.trainable='all'",
    "distillation.weight=0.5": "distillation.teacher=None, logits=None",
    "distillation={teacher: a, logits: b}": "distillation.teacher=a, logits=b",
    "watch.evaluate_every=5": "watch.evaluate_every=5",
    "distillation={logits: b, match_steps: 3}": "distillation.match_steps=3",
    "distillation={logits: b, temperature: 2}": "distillation.temperature=2",
    "hub.repo=a/b/c": "hub.repo='a/b/c'",
    "hub.token=hf_secret": "'token'",
    "sweep.learning_rates=[1e-4]": "sweep.learning_rates=[0.0001]",
    "sweep.learning_rates=[1e-3, 1.0000001e-3]": "sweep.learning_rates=[0.001, 0.0010000001]",
    "train.betas=[0.9, 1]": "train.betas.1='1'",
    "train.seed=4294967296": "train.seed='4294967296'",
    "train.seed=-1": "train.seed='-1'",
    f"train.tokens={'9' * 400}": "9223372036854775807",
    f"train.batch_tokens={'9' * 400}": "9223372036854775807",
    "data.sources=[{path: a, weight: 1}, {path: b, weight: 1e-5}]": "100001",
    "data.sources=[{path: a, weight: 1e308}, {path: b, weight: 0.1}]": "e+309",
}


@pytest.mark.parametrize("change", BAD_VALUES)
def test_invalid_values_are_refused(tmp_path, change):
    path = write_recipe(tmp_path, PATH, DATA, TRAIN)
    assert str(path) in assert_refused(path, [change], BAD_VALUES[change])


@pytest.mark.parametrize(
    ("name", "change"), [("small/digits_dit", "watch.every=1"), ("small/vit_mixture", "objective.new_classifier=true")]
)
def test_training_mixers_alone_is_refused_beside_new_random_weights(name, change):
    load_recipe(name, [change])
    assert_refused(name, [change, "train.trainable=mixers"], "train.trainable='mixers' would leave new random weights")


BAD_CHANGES = {
    "train.learning_rate": "key=value",
    "=1": "key=value",
    "train..seed=1": "key=value",
    "train.seed=[": "YAML",
    "output.folder=a": "'folder'",
    "data.sources.1.path=a": "there is no '1' in [{'path': 'text.txt'}]; use an index from 0 to 0",
    "data.sources.first=a": "'first'",
}


@pytest.mark.parametrize("change", BAD_CHANGES)
def test_invalid_overrides_are_refused(tmp_path, change):
    assert_refused(write_recipe(tmp_path, PATH, DATA, TRAIN), [change], BAD_CHANGES[change])


def test_misspelt_recipe_name_gets_a_suggestion():
    with pytest.raises(RecipeError, match=r"'small/smollm2_explict'.*'small/smollm2_explicit'"):
        load_recipe("small/smollm2_explict")


def test_override_changes_only_one_use_of_a_yaml_anchor(tmp_path):
    data = "data: {length: 64, sources: [&one {path: a}, *one]}"
    recipe = load_recipe(write_recipe(tmp_path, PATH, data, TRAIN), ["data.sources.0.weight=5"])
    assert [source.weight for source in recipe.data.sources] == [5, 1]


def test_leading_tilde_expands_to_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/users/somebody")
    path = write_recipe(tmp_path, "model: {path: ~/a}", DATA, TRAIN)
    recipe = load_recipe(path, ["output=~/runs", "data.sources.0.path=~/texts"])
    paths = (recipe.model.path, recipe.output, recipe.data.sources[0].path, recipe.data.cache)
    expected = ("a", "runs", "texts", ".cache/crosshead/tokens")
    assert paths == tuple(f"/users/somebody/{name}" for name in expected)
    assert load_recipe(path, ["data.cache=b/~/c"]).data.cache == "b/~/c"
    for key in ("data.cache", "data.sources.0.path"):
        assert_refused(
            path, [f"{key}=~nosuchuser/x"], f"{key}='~nosuchuser/x': it begins with the home folder of an unknown user"
        )


@pytest.mark.parametrize("content", [b"", b"- a\n- b", b"\xff\xfe\x00", b"just text", None])
def test_non_recipe_files_are_refused(tmp_path, content):
    path = tmp_path / "recipe.yaml"
    if content is not None:
        path.write_bytes(content)
    assert_refused(path, [], str(path))


def test_shipped_json_schema_is_up_to_date():
    assert (RECIPES / "recipe.schema.json").read_text(encoding="utf-8") == json_schema(), "run `make tables`"
