"""Every shipped recipe parses, has a model of the claimed size and valid commands, and shrinks to a toy."""

import re
import shlex
from pathlib import Path

import pytest
import torch
import transformers
import typer
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from crosshead.conversion.mixers import read_mixers
from crosshead.conversion.options import split_argument
from crosshead.recipes.schema.model_config import model_config
from crosshead.recipes.schema.recipe import load_recipe, shipped_recipes
from crosshead.recipes.schema.toy import toy, toy_config
from crosshead.recipes.trainer.checkpoints import MODEL
from crosshead.recipes.trainer.objectives import objective_of
from crosshead.recipes.trainer.parameters import set_trainable
from crosshead_command.main import app

RECIPES = Path(__file__).parents[2] / "recipes"
SHIPPED = shipped_recipes()
PARAMETERS = {  # billions, as the papers print them
    "papers/kha_dense_0.61b": (0.61, 0.01),
    "papers/kha_dense_1.68b": (1.68, 0.01),
    "papers/kha_dense_3.94b": (3.94, 0.01),
    "papers/kha_moe_a0.8b_6.6b": (6.6, 0.1),
    "papers/mea_1b": (1.4985, 0.0001),  # Llama-3.2-1B's 1.2358 and a head of 128,256 x 2,048
    "papers/mea_qwen3_30b": (30.5, 0.1),
    "papers/moh_dit_xl_2": (0.6754, 0.0001),  # without the position table, which is not trained
    "papers/moh_llama3_8b": (8.03 + 2 * 32_640 * 4096 / 1e9, 0.01),
    "papers/moh_llm_b": (0.882, 0.001),
    "papers/moh_llm_s": (0.186, 0.001),
    "papers/moh_vit_s": (0.0499, 0.0001),  # table 1: 50 million
    "papers/talking_albert_base": (0.0323, 0.0001),  # embeddings of 30,514 x 768, one layer of 7.09, and the heads
    "papers/talking_t5_base": (0.2229, 0.0001),  # as T5 base, which ties its embeddings
    "small/bert": (0.1096, 0.0001),
    "small/digits_dit": (0.00035, 0.0001),
    "small/digits_vit": (0.000205, 0.00001),
    "small/dit": (0.0329, 0.0001),
    "small/smollm2": (0.1345, 0.003),
    "small/smollm2_differential": (0.1446, 0.0001),  # 9 query heads more in each layer
    "small/qwen3_0.6b": (0.596, 0.03),
    "small/t5": (0.0605, 0.0001),
    "small/vit": (0.0867, 0.0001),
}
ACTIVE = {(32, 4): 880, (16, 8): 795, (32, 1): 859, (16, 16): 852}
"""(query heads, key/value heads) -> millions of active parameters; Knocking-Heads, table 3."""
ACCELERATE = sorted((RECIPES / "accelerate").glob("*.yaml"))


def auto_class(recipe):
    """Return the Auto class of a recipe's model."""
    return getattr(transformers, recipe.objective.auto_class)


def config_of(recipe):
    return model_config(recipe.model.config, recipe.objective)


def parameter_counts(recipe):
    with torch.device("meta"):
        model = objective_of(recipe).new_model(config_of(recipe))
    return {name: tensor.numel() for name, tensor in model.named_parameters()}


@pytest.mark.parametrize("name", SHIPPED)
def test_parameter_counts_equal_claimed_sizes(name):
    claim, tolerance = PARAMETERS[max((start for start in PARAMETERS if name.startswith(start)), key=len)]
    counted = sum(parameter_counts(load_recipe(name)).values()) / 1e9
    assert counted == pytest.approx(claim, abs=tolerance)


@pytest.mark.parametrize("heads", ACTIVE)
def test_knocking_moe_active_parameters_equal_paper_table(heads):
    changes = [f"model.config.num_attention_heads={heads[0]}", f"model.config.num_key_value_heads={heads[1]}"]
    recipe = load_recipe("papers/kha_moe_a0.8b_6.6b", [*changes, "model.config.mixers={}"])
    config = config_of(recipe)
    active = config.num_experts_per_tok / config.num_experts
    counted = sum(count * (active if ".experts." in name else 1) for name, count in parameter_counts(recipe).items())
    assert round(counted / 1e6) == ACTIVE[heads]


@pytest.mark.parametrize("name", SHIPPED)
def test_overrides_in_recipe_comments_are_valid(name):
    text = SHIPPED[name].read_text(encoding="utf-8")
    comments = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    for change in re.findall(r"--set ((?:'[^']*'|[^\s',;])+)", comments):
        assert load_recipe(name, shlex.split(change)) != load_recipe(name)


def convert_commands(recipe):
    """Return the words of each line of `model.convert`, split as a shell would."""
    text = (recipe.model.convert or "").replace("\\\n", " ")
    sequence = re.compile(r"\$\(seq -s\+ (\d+) (\d+)\)")
    text = sequence.sub(lambda match: "+".join(map(str, range(int(match[1]), int(match[2]) + 1))), text)
    return [shlex.split(line) for line in text.splitlines()]


@pytest.mark.parametrize("name", [name for name in SHIPPED if load_recipe(name).model.path])
def test_convert_commands_make_the_expected_model(name):
    recipe = load_recipe(name)
    made = {}
    trained = {f"{load_recipe(other).output}/{MODEL}" for other in SHIPPED if other != name}
    for program, command, *arguments in convert_commands(recipe):
        assert program == "crosshead"
        context = typer.main.get_command(app).commands[command].make_context(command, arguments)
        input_path = context.params["source" if command == "convert" else "model"]
        assert input_path in made or input_path in trained or not input_path.startswith(("models/", "runs/"))
        made[str(context.params["out"])] = context.params
    assert recipe.model.path in made or recipe.model.path in trained
    if recipe.model.path in made:
        conversion = made[recipe.model.path]
        config = config_of(recipe)
        layouts = model_config(recipe.model.config | {"mixers": {}}, recipe.objective).layouts()
        request = read_mixers(dict(split_argument(argument) for argument in conversion["mixer"]), layouts)
        requested = recipe.model.config | {"mixers": request.mixers}
        assert model_config(requested, recipe.objective).mixers == config.mixers
        assert conversion["vocab_size"] in (None, getattr(config, "vocab_size", None))
        assert recipe.distillation is None or recipe.distillation.teacher == conversion["source"]


@pytest.mark.parametrize("name", SHIPPED)
def test_toy_recipe_keeps_model_structure(name, tmp_path):
    recipe = load_recipe(name)
    small = toy(recipe, tmp_path)
    config, large = config_of(small), config_of(recipe)
    assert type(config) is type(large) and list(config.mixers) == list(large.mixers)
    assert config.num_attention_heads == large.num_attention_heads
    assert small.train.trainable == recipe.train.trainable and small.train.lora == recipe.train.lora
    assert small.batch_size > small.train.micro_batch and small.warmup_steps == (recipe.warmup_steps > 0)
    assert (small.model.path is None) == (recipe.model.path is None)
    assert (small.distillation is None) == (recipe.distillation is None)
    torch.manual_seed(0)
    if small.model.path is None:
        model = objective_of(small).new_model(config)
    else:
        model = auto_class(small).from_pretrained(small.model.path)
    assert model.num_parameters() < 1_000_000
    if recipe.objective.name == "noise":
        assert (small.model.vae is None) == (recipe.model.vae is None)
        assert config.out_channels // config.in_channels == large.out_channels // large.in_channels
    if recipe.objective.name != "next_token":
        outputs = model(**objective_of(small).example(config, 1))
        assert all(part.isfinite().all() for part in outputs.values() if isinstance(part, torch.Tensor))
        return
    tokens = AutoTokenizer.from_pretrained(small.model.tokenizer)("Heads, working together.", return_tensors="pt")
    output = model(**tokens, labels=tokens["input_ids"])
    assert output.loss.isfinite()
    assert (output.aux_loss is not None) == bool(recipe.model.config.get("output_router_logits"))


def test_toy_config_keeps_layer_selection_of_mechanisms():
    content = {
        "model_type": "crosshead_llama",
        "num_hidden_layers": 8,
        "mixers": {
            "explicit": {"key_heads": [32, 1, 32, 2, 32, 4, 32, 8], "layers": [2, 3, 4]},
            "knocking": {"layers": [7]},
        },
    }
    small = model_config(toy_config(content, 257))
    assert small.mixers["explicit"]["key_heads"] == [32, 32, 32, 32]
    assert small.mixers["explicit"]["layers"] == [1, 2]
    assert small.mixers["knocking"]["layers"] == [2]


def test_toy_config_shortens_layer_types_and_drops_ids_beyond_vocabulary():
    content = {
        "model_type": "crosshead_qwen3",
        "num_hidden_layers": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"] * 2,
        "pad_token_id": 151_643,
        "eos_token_id": 256,
        "mixers": {"knocking": {}},
    }
    small = toy_config(content, 257)
    assert small["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert "pad_token_id" not in small and small["eos_token_id"] == 256
    AutoModelForCausalLM.from_config(model_config(small))


def test_toy_of_dinov2_classifies_images(tmp_path):
    sizes = "{model_type: crosshead_dinov2, num_hidden_layers: 8, num_labels: 1000, mixers: {knocking: {}}}"
    small = toy(load_recipe("small/vit_mixture", ["model.config=null", f"model.config={sizes}"]), tmp_path)
    model, config = auto_class(small).from_pretrained(small.model.path), config_of(small)
    assert type(model).__name__ == "CrossheadDinov2ForImageClassification" and config.num_hidden_layers == 4
    model = set_trainable(model, small.train)
    logits = model(**objective_of(small).example(config, 1)).logits
    assert logits.shape == (1, 4)
    logits.sum().backward()
    unused = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert unused == {"dinov2.embeddings.mask_token"}  # frozen: data parallelism needs all other gradients
    assert not model.dinov2.embeddings.mask_token.requires_grad


@pytest.mark.parametrize("version", [2, 3])
def test_toy_config_of_deepseek_is_small(version):
    content = {"model_type": f"crosshead_deepseek_v{version}", "num_experts_per_tok": 6, "mixers": {"knocking": {}}}
    config = model_config(toy_config(content, 257))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert model.num_parameters() < 4_000_000
    assert config.num_attention_heads == model_config(content).num_attention_heads
    assert config.n_routed_experts == 8 and config.kv_lora_rank == 16
    assert model.to_empty(device="cpu")(torch.ones(1, 3, dtype=torch.long)).logits.shape == (1, 3, 257)


def test_toy_keeps_random_state(tmp_path):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    toy(load_recipe("small/smollm2_explicit"), tmp_path)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("path", ACCELERATE, ids=lambda path: path.stem)
def test_accelerate_loads_shipped_configurations(path):
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    launch = pytest.importorskip("accelerate.commands.launch")
    config = config_args.load_config_from_file(str(path))
    assert config.num_processes % config.num_machines == 0
    # Accelerate accepts any key inside a section, where a misspelt one would have no effect.
    known = vars(launch.launch_command_parser().parse_args(["script.py"]))
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    for section in ("fsdp_config", "deepspeed_config"):
        assert set(content.get(section, {})) <= set(known)


def test_number_of_shipped_recipes():
    assert len(SHIPPED) == 36 and len(ACCELERATE) == 4
