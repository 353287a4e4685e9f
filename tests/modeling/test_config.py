"""Valid configurations: defaults, saving and loading, and the frozen names that saved files depend on."""

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

import crosshead
from case_grids import for_each_case_and_backbone
from crosshead import CrossheadLlamaForCausalLM
from toys import BACKBONES, CASES, LATENT, STOCK, mixed_config, mixed_model, stock_config, stock_model

QWEN3_MOE = "crosshead_qwen3_moe"
MODEL_TYPES = {name: f"crosshead_{name.lower()}" for name in (*STOCK, "ViT", "DeiT", "Dinov2", "TransNext")}
MODEL_TYPES |= {name: f"crosshead_{name[:8].lower()}_{name[8:].lower()}" for name in LATENT} | {"Qwen3Moe": QWEN3_MOE}
DEFAULTS: dict[str, dict[str, Any]] = {
    "knocking": {"form": "mlp", "on": ["value"], "init": "identity"},
    "explicit": {"on": ["key", "value"], "groups": 1, "norm": True},
    "mixture": {"router": "two_stage", "gate": "weighted", "gate_scale": "unit", "balance_weight": 0.01},
    "talking": {"on": ["logits", "weights"], "dynamic": []},
    "differential": {"version": 1, "norm": True, "half_values": False},
    "gating": {},
}
WITHOUT_DEFAULT = {
    "explicit": {"key_heads", "value_heads"},
    "mixture": {"shared_heads", "active_heads"},
    "talking": {"softmax_heads"},
}
FLAGS = (("explicit", "norm"), ("differential", "norm"), ("differential", "half_values"))
REQUIRED: dict[str, dict[str, Any]] = {"mixture": {"shared_heads": 1, "active_heads": 3}}
VALUES: list[tuple[str, str, list[Any]]] = [
    ("knocking", "form", ["mlp", "linear", "gate"]),
    ("knocking", "on", [["query"], ["key"], ["value", "key", "query"]]),
    ("knocking", "init", ["identity", "random"]),
    ("explicit", "on", [["key"], ["value"], ["value", "key"]]),
    *(("explicit", side, [1, 2, [2, 1]]) for side in ("key_heads", "value_heads")),
    ("explicit", "groups", [1, 2]),
    ("mixture", "shared_heads", [0, 2, [0, 2]]),
    ("mixture", "active_heads", [2, 4, [2, 4]]),
    ("mixture", "router", ["two_stage", "query_norm"]),
    ("mixture", "gate", ["weighted", "binary"]),
    ("mixture", "gate_scale", ["unit", "paper"]),
    ("mixture", "balance_weight", [0.0, 0.01, 1.5]),
    ("talking", "on", [["logits"], ["weights"], ["weights", "logits"]]),
    ("talking", "softmax_heads", [1, 4, 6]),
    ("talking", "dynamic", [[], ["key_weights", "query_logits"], ["query_weights"], ["key_logits"]]),
    ("differential", "version", [1]),
    *((name, flag, [True, False]) for name, flag in FLAGS),
    *((name, "layers", [[0], [1], [0, 1]]) for name in DEFAULTS),
]
ORDERS = [["talking", "mixture", "knocking"], ["explicit", "talking", "knocking", "mixture"]]
ORDERS.append(ORDERS[0][::-1])
COMBINATIONS: list[dict[str, Any]] = [
    {"talking": {"layers": [0]}, "differential": {"layers": [1]}},
    {"differential": {"layers": [1]}, "explicit": {"layers": [0]}},
    {"mixture": {"active_heads": 3, "layers": [1]}, "explicit": {"layers": [0]}},
    {"mixture": {"active_heads": 3, "router": "query_norm", "layers": [0]}, "differential": {"layers": [1]}},
    {"mixture": {"active_heads": [4, 2]}, "differential": {"layers": [1]}},
    # Combinations within one layer.
    {"explicit": {}, "mixture": {"active_heads": 3}},
    {"mixture": {"active_heads": 3}, "explicit": {"norm": False}},
    {"differential": {}, "explicit": {"norm": False, "value_heads": 1}},
    {"differential": {}, "mixture": {"active_heads": 2}},
    {"knocking": {}, "explicit": {}, "talking": {"dynamic": ["key_logits"]}, "mixture": {"active_heads": 3}},
    {"talking": {"on": ["weights"], "softmax_heads": 4}},
]


def config_class(backbone: str) -> type[Any]:
    """Return the crosshead configuration class of a backbone."""
    return getattr(crosshead, f"Crosshead{backbone}Config")


@pytest.mark.parametrize("name", DEFAULTS)
def test_omitted_options_get_defaults(name: str) -> None:
    required = REQUIRED.get(name, {})
    assert mixed_config("Llama", {name: required}).mixers == {name: DEFAULTS[name] | required}


def test_none_options_get_defaults() -> None:
    mixers = {"knocking": None, "explicit": {"norm": None, "key_heads": None, "layers": None, "on": None}}
    assert mixed_config("Llama", mixers).mixers == {name: DEFAULTS[name] for name in mixers}


def test_shared_heads_default_to_half_of_active_heads() -> None:
    assert mixed_config("Llama", {"mixture": {"active_heads": 3}}).mixers["mixture"]["shared_heads"] == 1
    assert mixed_config("Llama", {"mixture": {"active_heads": [1, 4]}}).mixers["mixture"]["shared_heads"] == [0, 2]


@pytest.mark.parametrize(("name", "option", "values"), VALUES, ids=[f"{name}.{option}" for name, option, _ in VALUES])
def test_every_valid_option_value_is_kept(name: str, option: str, values: list[Any]) -> None:
    for value in values:
        required = REQUIRED.get(name, {}) | ({"shared_heads": 1} if option == "active_heads" else {})
        assert mixed_config("Llama", {name: required | {option: value}}).mixers[name][option] == value


@pytest.mark.parametrize("mixers", COMBINATIONS, ids=str)
def test_allowed_mechanism_combinations_build_models(mixers: dict[str, Any]) -> None:
    config = mixed_config("Llama", mixers)
    model = CrossheadLlamaForCausalLM(config)
    for index, layer in enumerate(model.model.layers):
        names = [name for name, options in mixers.items() if index in options.get("layers", [0, 1])]
        assert list(config.mixers_of_layer(index)) == names
        assert list(getattr(layer.self_attn, "mixers", {})) == names


def test_mixers_of_layer_resolves_per_layer_options() -> None:
    mixers = {"explicit": {"key_heads": (2, 1, 2)}, "talking": {"layers": (2, 0)}, "knocking": {"on": ("key",)}}
    config = mixed_config("Llama", mixers, num_hidden_layers=3)
    assert config.mixers["explicit"]["key_heads"] == [2, 1, 2]
    assert config.mixers["talking"]["layers"] == [0, 2]
    assert config.mixers["knocking"]["on"] == ["key"]
    assert [list(config.mixers_of_layer(layer)) for layer in range(3)] == [
        ["explicit", "talking", "knocking"],
        ["explicit", "knocking"],
        ["explicit", "talking", "knocking"],
    ]
    assert [config.mixers_of_layer(layer)["explicit"]["key_heads"] for layer in range(3)] == [2, 1, 2]
    assert "layers" not in config.mixers_of_layer(0)["talking"]


def test_mixers_argument_is_copied() -> None:
    mixers = {"knocking": {"on": ["value"]}, "mixture": {"active_heads": [3, 3]}}
    before = copy.deepcopy(mixers)
    config = mixed_config("Llama", mixers)
    config.mixers["knocking"]["on"].append("key")
    config.mixers["mixture"]["active_heads"][0] = 2
    assert mixers == before


ROUND_TRIPS: dict[str, Callable[[Any, Path], Any]] = {
    "deepcopy": lambda config, folder: copy.deepcopy(config),
    "pickle": lambda config, folder: pickle.loads(pickle.dumps(config)),
    "to_dict": lambda config, folder: type(config).from_dict(config.to_dict()),
    "to_diff_dict": lambda config, folder: type(config).from_dict(config.to_diff_dict()),
    "constructor": lambda config, folder: type(config)(**config.to_dict()),
    "json": lambda config, folder: type(config).from_dict(json.loads(config.to_json_string())),
    "whole json": lambda config, folder: type(config).from_dict(json.loads(config.to_json_string(use_diff=False))),
    "folder": lambda config, folder: config.save_pretrained(folder) or type(config).from_pretrained(folder),
    "auto": lambda config, folder: config.save_pretrained(folder) or AutoConfig.from_pretrained(folder),
    "json file": lambda config, folder: (
        config.save_pretrained(folder) or type(config).from_json_file(folder / "config.json")
    ),
}


@pytest.mark.parametrize("way", ROUND_TRIPS)
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_mechanism_order_survives_serialisation(order: list[str], way: str, tmp_path: Path) -> None:
    config = mixed_config("Qwen3", {name: REQUIRED.get(name, {}) for name in order})
    again = ROUND_TRIPS[way](config, tmp_path)
    assert type(again) is type(config)
    assert list(again.mixers) == order
    assert again.to_json_string() == config.to_json_string()
    assert again.model_type == "crosshead_qwen3"


@for_each_case_and_backbone
def test_saved_config_is_complete(backbone: str, case: str, tmp_path: Path) -> None:
    config = mixed_config(backbone, CASES[case])
    config.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert content["model_type"] == MODEL_TYPES[backbone]
    assert content["auto_map"] == {
        "AutoConfig": f"modeling_crosshead.Crosshead{backbone}Config",
        "AutoModel": f"modeling_crosshead.Crosshead{backbone}Model",
        "AutoModelForCausalLM": f"modeling_crosshead.Crosshead{backbone}ForCausalLM",
        "AutoModelForSequenceClassification": f"modeling_crosshead.Crosshead{backbone}ForSequenceClassification",
    }
    assert json.dumps(content["mixers"]) == json.dumps(config.mixers)
    assert all(DEFAULTS[name].keys() <= options.keys() for name, options in content["mixers"].items())
    assert type(AutoConfig.from_pretrained(tmp_path)) is config_class(backbone)


FROM_STOCK: dict[str, Callable[[Any, Path, type[Any]], Any]] = {
    "folder": lambda stock, folder, ours: stock.save_pretrained(folder) or ours.from_pretrained(folder),
    "json file": lambda stock, folder, ours: (
        stock.save_pretrained(folder) or ours.from_json_file(folder / "config.json")
    ),
    "from_dict": lambda stock, folder, ours: ours.from_dict(stock.to_dict()),
    "constructor": lambda stock, folder, ours: ours(**stock.to_dict()),
}


@pytest.mark.parametrize("way", FROM_STOCK)
def test_config_from_stock_has_crosshead_model_type(way: str, tmp_path: Path) -> None:
    for backbone in BACKBONES:
        config = FROM_STOCK[way](stock_config(backbone), tmp_path, config_class(backbone))
        assert config.model_type == MODEL_TYPES[backbone]


@pytest.mark.parametrize("way", FROM_STOCK)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_config_without_mixers_equals_stock_config(backbone: str, way: str, tmp_path: Path) -> None:
    for stock in (stock_config(backbone), STOCK[backbone][0]()):
        config = FROM_STOCK[way](stock, tmp_path, config_class(backbone))
        ours = {"model_type": MODEL_TYPES[backbone], "mixers": {}, "auto_map": config.auto_map}
        assert config.to_dict() == stock.to_dict() | ours


Tensors = dict[str, tuple[int, ...]]


def new(names: str, *shape: int) -> Tensors:
    """Return name -> shape of weights of one shape; `names` are relative to `mixers`."""
    return {f"mixers.{name}.weight": shape for name in names.split()}


KEYS, VALUES_TOO = {"k_proj.weight": (8, 24)}, {"v_proj.weight": (8, 24)}
SHARED_MLP = new("knocking.value.up knocking.value.gate knocking.value.down", 8, 8)
KEY_MLP = new("knocking.key.up knocking.key.gate knocking.key.down", 8, 8)
NORM = new("explicit.norm", 8)
ROUTERS = new("mixture.shared mixture.routed mixture.balance", 2, 24)
PAIR_ROUTERS = new("mixture.shared mixture.routed", 1, 24) | new("mixture.balance", 2, 24)
DYNAMIC = new("talking.query_logits talking.key_logits talking.query_weights talking.key_weights", 20, 24)
LAMBDAS: Tensors = {f"mixers.differential.lambda_{name}": (8,) for name in ("q1", "k1", "q2", "k2")}
HALF_VALUES: Tensors = LAMBDAS | {"v_proj.weight": (8, 24), "o_proj.weight": (24, 16)}
BIAS_AND_OUTPUT: Tensors = {"mixers.differential.lambda_bias": (2,), "o_proj.weight": (24, 16)}
FOUR_TERMS = ["query_logits", "key_logits", "query_weights", "key_weights"]

# `mixers`, then the new or reshaped tensors of `self_attn` in each of the two layers. The model has 4 query heads of
# size 8, 2 key/value heads, and a hidden size of 24.
TENSORS: list[tuple[dict[str, Any], Tensors, Tensors]] = [
    ({"knocking": {}}, SHARED_MLP, SHARED_MLP),
    ({"knocking": {"layers": [1]}}, {}, SHARED_MLP),
    ({"knocking": {"on": ["key"]}}, KEY_MLP, KEY_MLP),
    (
        {"knocking": {"form": "linear", "on": ["query", "key", "value"], "layers": [0]}},
        new("knocking.query knocking.key knocking.value", 8, 8),
        {},
    ),
    ({"knocking": {"form": "gate", "layers": [1]}}, {}, new("knocking.value.gate", 8, 8)),
    ({"explicit": {"layers": [1]}}, {}, new("explicit.key explicit.value", 2, 2) | NORM),
    ({"explicit": {"on": ["value"], "layers": [1]}}, {}, new("explicit.value", 2, 2) | NORM),
    ({"explicit": {"on": ["key"], "key_heads": 1, "layers": [1]}}, {}, new("explicit.key", 2, 1) | NORM | KEYS),
    (
        {"explicit": {"key_heads": 1, "value_heads": [1, 2], "norm": False}},
        new("explicit.key explicit.value", 2, 1) | KEYS | VALUES_TOO,
        new("explicit.key", 2, 1) | new("explicit.value", 2, 2) | KEYS,
    ),
    ({"explicit": {"groups": 2, "layers": [1]}}, {}, new("explicit.key explicit.value", 2, 1) | NORM),
    ({"mixture": {"active_heads": 4}}, ROUTERS, ROUTERS),
    ({"mixture": {"active_heads": 4, "layers": [1]}}, {}, ROUTERS),
    ({"mixture": {"active_heads": 4, "shared_heads": [0, 2]}}, new("mixture.routed", 4, 24), ROUTERS),
    ({"mixture": {"active_heads": 3, "router": "query_norm"}}, {}, {}),
    ({"talking": {"layers": [1]}}, {}, new("talking.logits talking.weights", 4, 4)),
    ({"talking": {"on": ["logits"], "layers": [1]}}, {}, new("talking.logits", 4, 4)),
    ({"talking": {"on": ["weights"], "layers": [1]}}, {}, new("talking.weights", 4, 4)),
    (
        {"talking": {"softmax_heads": 5, "dynamic": FOUR_TERMS, "layers": [0]}},
        new("talking.logits", 5, 4) | new("talking.weights", 4, 5) | DYNAMIC,
        {},
    ),
    ({"differential": {}}, LAMBDAS, LAMBDAS),
    ({"differential": {"norm": False, "layers": [1]}}, {}, LAMBDAS),
    ({"differential": {"half_values": True}}, HALF_VALUES, HALF_VALUES),
    ({"differential": {"version": 2, "layers": [1]}}, {}, BIAS_AND_OUTPUT | new("differential.lambda_proj", 2, 24)),
    ({"mixture": {"active_heads": 2, "layers": [1]}, "differential": {}}, LAMBDAS, LAMBDAS | PAIR_ROUTERS),
]


def tensor_shapes(model: Any) -> Tensors:
    """Return name -> shape of a model's tensors."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def test_model_types_and_option_names_are_frozen() -> None:
    """Saved models of users depend on these names: changing them breaks the models."""
    ours = {config.model_type: config.__name__ for config in crosshead.FAMILIES}
    assert ours == {model_type: f"Crosshead{backbone}Config" for backbone, model_type in MODEL_TYPES.items()}
    options = {name: set(crosshead.MECHANISMS[name].rules.options) for name in DEFAULTS}
    assert options == {name: set(defaults) | WITHOUT_DEFAULT.get(name, set()) for name, defaults in DEFAULTS.items()}


@pytest.mark.parametrize(("mixers", "first", "second"), TENSORS, ids=[str(row[0]) for row in TENSORS])
def test_tensor_names_and_shapes_are_frozen(mixers: dict[str, Any], first: Tensors, second: Tensors) -> None:
    expected = tensor_shapes(stock_model("Llama"))
    for index, tensors in enumerate((first, second)):
        expected |= {f"model.layers.{index}.self_attn.{name}": shape for name, shape in tensors.items()}
    assert tensor_shapes(mixed_model("Llama", mixers)) == expected


@pytest.mark.parametrize("backbone", BACKBONES)
def test_stock_tensors_keep_their_names(backbone: str) -> None:
    stock = tensor_shapes(stock_model(backbone))
    assert tensor_shapes(mixed_model(backbone, {})) == stock
    mixers = {"knocking": {"form": "gate"}, "explicit": {"key_heads": 1, "value_heads": [2, 1], "norm": False}}
    fewer = [name for name in stock if "0.self_attn.k_proj" in name or "1.self_attn.k_proj" in name]
    fewer += [name for name in stock if "1.self_attn.v_proj" in name]
    expected = stock | {name: (8, *stock[name][1:]) for name in fewer}
    for layer, values in ((0, 2), (1, 1)):
        prefix = f"model.layers.{layer}.self_attn.mixers"
        expected[f"{prefix}.knocking.value.gate.weight"] = (8, 8)
        expected |= {f"{prefix}.explicit.key.weight": (2, 1), f"{prefix}.explicit.value.weight": (2, values)}
    assert tensor_shapes(mixed_model(backbone, mixers)) == expected
