"""Invalid configurations are refused; the message names the option, the value as typed, and the allowed values."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

import crosshead
from crosshead import CrossheadLlamaConfig, CrossheadLlamaModel
from toys import BACKBONES, SIZES, mixed_config, stock_config

COUNT, ALSO_ZERO = ("1", "2"), ("0", "2")  # the minimum, and the length of a per-layer list
WHOLE, NUMBER, FLAG, LAYERS = ("1",), ("0",), ("true", "false"), ("0", "1")
FORMS = ("'mlp'", "'linear'", "'gate'")
TARGETS = ("'query'", "'key'", "'value'")
SIDES = ("'key'", "'value'")
STAGES = ("'logits'", "'weights'")
DYNAMIC = ("'query_logits'", "'key_logits'", "'query_weights'", "'key_weights'")
NAN, INFINITY = float("nan"), float("inf")

BAD_VALUES: list[tuple[str, tuple[str, ...], list[Any]]] = [
    ("knocking.form", FORMS, ["mpl", "MLP", "", True, 0, ["mlp"], {"mlp": {}}]),
    ("knocking.on", TARGETS, ["value", 1, True, ["value", None], [["value"]], {"value": True}, {"value"}]),
    ("knocking.on", TARGETS, [[], ["key", "value", "key"]]),
    ("knocking.on", (*TARGETS, "'values'"), [["key", "values"]]),
    ("knocking.init", ("'identity'", "'random'"), ["zero", 0.02, ["identity"]]),
    ("knocking.layers", LAYERS, [[], 1, False, "all", [2], range(3)]),
    ("explicit.layers", LAYERS, [[-1], [1.0]]),
    ("mixture.layers", LAYERS, [[0, 0], [0, None]]),
    ("talking.layers", LAYERS, [[True], [[0], [1]]]),
    ("differential.layers", LAYERS, [["1"], {"0": True}]),
    ("explicit.on", SIDES, [["query"], "key+value", [], ["key", "key"], ["key", 1]]),
    ("explicit.key_heads", COUNT, [0, -1, True, 1.0, "1", {"0": 1, "1": 2}]),
    ("explicit.value_heads", COUNT, ["50%", [], [1], [1, 2, 1], [1, None], [1, 0], [2, True], [[1], [2]]]),
    ("explicit.key_heads", ("1", "2"), [3]),
    ("explicit.value_heads", ("1", "2"), [8]),
    ("explicit.groups", ("2", "key/value heads"), [3, 4]),
    ("explicit.groups", WHOLE, [0, -2, True, 2.0, "2", [1, 2]]),
    ("explicit.norm", FLAG, [1, "false", [True, False]]),
    ("mixture.active_heads", COUNT, [0, -2, True, 0.75, "75%", [3], [3, 3.0], [[3], [3]]]),
    ("mixture.active_heads", ("1", "4"), [5]),
    ("mixture.shared_heads", ALSO_ZERO, [-1, False, "1", [0, 1, 1], [1, -1]]),
    ("mixture.shared_heads", ("active_heads=3", "0", "2"), [3, 4]),
    ("mixture.router", ("'two_stage'", "'query_norm'"), ["norm", ["two_stage"]]),
    ("mixture.gate", ("'weighted'", "'binary'"), ["soft", False]),
    ("mixture.gate_scale", ("'unit'", "'paper'"), ["Paper", 1]),
    ("mixture.balance_weight", NUMBER, [-0.01, NAN, INFINITY, True, "0.01", [0.01, 0.01]]),
    ("talking.on", STAGES, [["weight"], [], "logits", ["logits", "logits"]]),
    ("talking.softmax_heads", WHOLE, [0, -4, True, 6.0, "6", [4, 6]]),
    ("talking.dynamic", DYNAMIC, ["query_logits", True, ["logits"], [None], ["key_logits", "key_logits"]]),
    ("differential.norm", FLAG, [0, "True"]),
    ("differential.half_values", FLAG, [1, "True"]),
    ("differential.version", ("a whole number from 1 up",), [0, "2", True]),
    ("differential.version", ("1 or 2",), [3]),
]
"""Option, allowed values that the message must name, refused values."""


MECHANISMS = ("'knocking'", "'explicit'", "'mixture'", "'talking'", "'differential'")
MISSING = ("mixers.mixture.active_heads", *COUNT)
ONE_ROUTED = ("mixers.mixture.shared_heads=3", "router='query_norm'", "0 to 2")
SINGLE_HEADS = ("mixers.mixture.router='query_norm'", "'differential'", "'two_stage'")
TWO_NORMS = ("mixers.explicit.norm=True", "'differential'", "False")
GATES_LOST = ("mixers.mixture", "mixers.explicit.norm=True", "'explicit' first", "False")
TWO_OWNERS = ("mixers.talking", "mixers.differential")
ONE_MAP = ("mixers.talking.softmax_heads=6", "mixers.talking.on=['logits']", "4")

BAD_MIXERS: list[tuple[Any, tuple[str, ...]]] = [
    # Wrong types.
    (["knocking"], ("mixers=['knocking']",)),
    ([], ("mixers=[]",)),
    ([("knocking", {})], ("mixers=[('knocking', {})]",)),
    ("knocking", ("mixers='knocking'",)),
    (3, ("mixers=3",)),
    (False, ("mixers=False",)),
    ({"knocking": ["value"]}, ("mixers.knocking=['value']",)),
    ({"talking": "logits"}, ("mixers.talking='logits'",)),
    ({"differential": True}, ("mixers.differential=True",)),
    ({"mixture": 3}, ("mixers.mixture=3",)),
    # Unknown names. YAML 1.1 reads the key `on` as a bool.
    ({"knokking": {}}, ("mixers", "'knokking'", "'knocking'", *MECHANISMS)),
    ({"Talking": {}}, ("mixers", "'Talking'", "'talking'", *MECHANISMS)),
    ({"mixture_of_heads": {}}, ("mixers", "'mixture_of_heads'", "'mixture'", *MECHANISMS)),
    ({"rotary": {}}, ("mixers", "'rotary'", *MECHANISMS)),
    ({"knocking": {}, "layers": [1]}, ("mixers", "'layers'", *MECHANISMS)),
    ({1: {}}, ("mixers", "1", *MECHANISMS)),
    ({"knocking": {"fom": "mlp"}}, ("mixers.knocking", "'fom'", "'form'", "'form'", "'layers'")),
    (
        {"mixture": {"active_head": 3}},
        ("mixers.mixture", "'active_head'", "'active_heads'", "'active_heads'", "'router'"),
    ),
    ({"explicit": {"form": "mlp"}}, ("mixers.explicit", "'form'", "'on'", "'key_heads'", "'value_heads'", "'norm'")),
    ({"differential": {"lambda_init": 0.8}}, ("mixers.differential", "'lambda_init'", "'norm'", "'layers'")),
    ({"talking": {True: ["logits"]}}, ("mixers.talking", "True", "'on'", "'softmax_heads'", "'dynamic'")),
    # Missing options of mixture, and its refused combinations.
    ({"mixture": {}}, MISSING),
    ({"mixture": None}, MISSING),
    ({"mixture": {"shared_heads": 1}}, MISSING),
    ({"mixture": {"active_heads": None}}, MISSING),
    ({"mixture": {"balance_weight": 10**400, "active_heads": 3}}, ("mixers.mixture.balance_weight=1000", *NUMBER)),
    ({"mixture": {"active_heads": [3, 5]}}, ("active_heads=5", "1", "4", "layer 1")),
    ({"mixture": {"active_heads": 3, "shared_heads": [1, 3]}}, ("shared_heads=3", "heads=3", "0", "2", "layer 1")),
    ({"mixture": {"active_heads": [3, 2], "shared_heads": 2}}, ("shared_heads=2", "heads=2", "0", "1", "layer 1")),
    ({"mixture": {"active_heads": 4, "shared_heads": 3, "router": "query_norm"}}, ONE_ROUTED),
    ({"mixture": {"active_heads": 4, "shared_heads": [1, 3], "router": "query_norm"}}, (*ONE_ROUTED, "layer 1")),
    ({"mixture": {"active_heads": 3}, "differential": {}}, ("active_heads=3", "1", "2")),
    ({"mixture": {"active_heads": 1, "router": "query_norm"}, "differential": {}}, SINGLE_HEADS),
    ({"mixture": {"active_heads": 2, "router": "query_norm"}, "differential": {}}, SINGLE_HEADS),
    ({"mixture": {"active_heads": 3}, "explicit": {}}, GATES_LOST),
    ({"mixture": {"active_heads": 3, "layers": [1]}, "explicit": {}}, (*GATES_LOST, "layer 1")),
    ({"gating": {}, "explicit": {}}, ("mixers.gating", *GATES_LOST[1:])),
    # Options of explicit.
    ({"explicit": {"key_heads": [1, 3]}}, ("explicit.key_heads=3", "1", "2", "layer 1")),
    ({"explicit": {"on": ["value"], "key_heads": 1}}, ("explicit.key_heads=1", "'key'", "explicit.on=['value']")),
    ({"explicit": {"on": ["key"], "value_heads": [2, 1]}}, ("value_heads=2", "'value'", "explicit.on=['key']")),
    ({"explicit": {"groups": 2, "value_heads": 1}}, ("explicit.groups=2", "2 key/value", "keys (2)", "values (1)")),
    ({"explicit": {"groups": 2, "key_heads": [2, 1]}}, ("explicit.groups=2", "keys (1)", "layer 1")),
    ({"explicit": {}, "differential": {}}, TWO_NORMS),
    ({"differential": {"layers": [1]}, "explicit": {}}, (*TWO_NORMS, "layer 1")),
    # Options of talking.
    ({"talking": {"on": ["logits"], "softmax_heads": 6}}, ONE_MAP),
    ({"talking": {"on": ["weights"], "dynamic": ["key_logits"]}}, ("dynamic", "'key_logits'", "on=['weights']")),
    ({"talking": {"on": ["logits"], "dynamic": ["query_weights"]}}, ("dynamic", "'query_weights'", "on=['logits']")),
    ({"talking": {}, "differential": {}}, TWO_OWNERS),
    ({"differential": {}, "talking": {"layers": [1]}}, (*TWO_OWNERS, "layer 1")),
]
BAD_MODELS: list[tuple[Any, dict[str, Any], tuple[str, ...]]] = [
    ({"explicit": {"key_heads": 3}}, {"num_key_value_heads": 1}, ("explicit.key_heads=3", "1")),
    ({"explicit": {"key_heads": 5}}, {"num_key_value_heads": 4}, ("explicit.key_heads=5", "1", "4")),
    ({"differential": {}}, {"num_attention_heads": 3, "num_key_value_heads": 3}, ("num_attention_heads=3",)),
    ({"differential": {"version": 2}}, {"num_key_value_heads": 4}, ("num_attention_heads=4", "multiple of 8")),
    ({"differential": {"version": 2, "half_values": True}}, {}, ("half_values=True", "version 2", "False")),
    ({"differential": {"version": 2, "norm": True}}, {}, ("norm=True", "version 2", "False")),
    ({"differential": {}}, {"num_attention_heads": 6, "num_key_value_heads": 3}, ("num_key_value_heads=3",)),
    ({"differential": {"layers": [1]}}, {"attention_dropout": 0.1}, ("differential", "attention_dropout=0.1", "0.0")),
    ({"talking": {"layers": [1]}}, {"num_hidden_layers": 1}, ("talking.layers=[1]", "0")),
    ({"explicit": {"key_heads": [1, 2]}}, {"num_hidden_layers": 3}, ("key_heads=[1, 2]", "3")),
]


def with_option(option: str, value: Any) -> dict[str, Any]:
    """Return `mixers` with one option of one mechanism, plus the options that the mechanism requires."""
    mechanism, name = option.split(".")
    required = {"active_heads": 3} if mechanism == "mixture" else {}
    return {mechanism: required | {name: value}}


TABLE = [
    pytest.param(with_option(option, value), {}, (f"mixers.{option}={value!r}", *allowed), id=f"{option}={value!r}")
    for option, allowed, values in BAD_VALUES
    for value in values
]
TABLE += [pytest.param(mixers, {}, pieces, id=repr(mixers)[:80]) for mixers, pieces in BAD_MIXERS]
TABLE += [pytest.param(*row, id=f"{row[0]} for {row[1]}") for row in BAD_MODELS]


@pytest.mark.parametrize(("mixers", "changes", "pieces"), TABLE)
def test_invalid_mixers_error_names_option_and_allowed_values(
    mixers: Any, changes: dict[str, Any], pieces: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError) as caught:
        mixed_config("Llama", mixers, **changes)
    message = str(caught.value)
    assert [piece for piece in pieces if message.count(piece) < pieces.count(piece)] == [], message
    assert "\n" not in message


@pytest.mark.parametrize("backbone", BACKBONES)
def test_every_backbone_refuses_invalid_value_heads(backbone: str) -> None:
    with pytest.raises(ValueError, match=r"mixers\.explicit\.value_heads=3"):
        mixed_config(backbone, {"explicit": {"value_heads": 3}})


REFUSED: list[Any] = [
    ["knocking"],
    {"knokking": {}},
    {"explicit": {"key_heads": 3}},
    {"talking": {}, "differential": {}},
]
WAYS_IN: dict[str, Callable[[Path, Any], Any]] = {
    "from_dict": lambda folder, mixers: CrossheadLlamaConfig.from_dict(SIZES | {"mixers": mixers}),
    "from_dict, beside": lambda folder, mixers: CrossheadLlamaConfig.from_dict(SIZES, mixers=mixers),
    "from_pretrained": lambda folder, mixers: CrossheadLlamaConfig.from_pretrained(folder, mixers=mixers),
    "AutoConfig": lambda folder, mixers: AutoConfig.from_pretrained(folder, mixers=mixers),
    "for_model": lambda folder, mixers: AutoConfig.for_model("crosshead_llama", **SIZES, mixers=mixers),
    "AutoModel": lambda folder, mixers: AutoModelForCausalLM.from_pretrained(folder, mixers=mixers),
}


@pytest.mark.parametrize("mixers", REFUSED, ids=str)
@pytest.mark.parametrize("way", WAYS_IN)
def test_every_loading_method_validates_mixers(way: str, mixers: Any, tmp_path: Path) -> None:
    mixed_config("Llama", {"knocking": {}}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="mixers"):
        WAYS_IN[way](tmp_path, mixers)


def test_mixers_passed_with_stock_folder_are_validated(tmp_path: Path) -> None:
    stock_config("Llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"mixers\.explicit\.key_heads=3"):
        CrossheadLlamaConfig.from_pretrained(tmp_path, mixers={"explicit": {"key_heads": 3}})


def test_edited_config_json_is_validated(tmp_path: Path) -> None:
    config = mixed_config("Llama", {"knocking": {}})
    (tmp_path / "config.json").write_text(config.to_json_string().replace('"mlp"', '"mpl"'), encoding="utf-8")
    for load in (CrossheadLlamaConfig.from_pretrained, AutoConfig.from_pretrained):
        with pytest.raises(ValueError, match=r"mixers\.knocking\.form='mpl'"):
            load(tmp_path)


MODELS = [model for models in crosshead.FAMILIES.values() for model in models]


@pytest.mark.parametrize("model", MODELS, ids=[model.__name__ for model in MODELS])
@pytest.mark.parametrize("mixers", REFUSED, ids=str)
def test_mixers_assigned_to_config_are_validated_by_model(model: type[Any], mixers: Any) -> None:
    config = model.config_class(**({} if hasattr(model.config_class, "stage_of_layer") else SIZES))
    config.mixers = mixers
    with pytest.raises(ValueError, match="mixers"):
        model(config)


# Changed config field, its new value, mixers that no longer fit, text of the message.
OUTGROWN: list[tuple[str, Any, dict[str, Any], str]] = [
    ("num_key_value_heads", 1, {"explicit": {"key_heads": 2}}, "key_heads=2"),
    ("num_hidden_layers", 1, {"explicit": {"key_heads": [1, 2]}}, r"key_heads=\[1, 2\]"),
    ("num_hidden_layers", 1, {"knocking": {"layers": [1]}}, r"layers=\[1\]"),
    ("num_attention_heads", 2, {"mixture": {"active_heads": 3}}, "active_heads=3"),
    ("attention_dropout", 0.1, {"differential": {}}, "attention_dropout=0.1"),
]
OUTGROWN_IDS = [f"{field}={value} with {mixers}" for field, value, mixers, _ in OUTGROWN]


@pytest.mark.parametrize(("field", "value", "mixers", "message"), OUTGROWN, ids=OUTGROWN_IDS)
def test_changed_config_field_is_validated_by_model(field: str, value: Any, mixers: Any, message: str) -> None:
    config = mixed_config("Llama", mixers)
    setattr(config, field, value)
    with pytest.raises(ValueError, match=message):
        CrossheadLlamaModel(config)


@pytest.mark.parametrize(("field", "value", "mixers", "message"), OUTGROWN, ids=OUTGROWN_IDS)
def test_config_field_override_is_validated_with_saved_mixers(
    field: str, value: Any, mixers: Any, message: str, tmp_path: Path
) -> None:
    mixed_config("Llama", mixers).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        CrossheadLlamaConfig.from_pretrained(tmp_path, **{field: value})


STOCK_REFUSES: list[dict[str, Any]] = [
    {"layer_types": ["full_attention"]},
    {"layer_types": ["full_attention", "windowed"]},
    {"output_attentions": True, "attn_implementation": "sdpa"},
    {"num_hidden_layers": "2"},
]


@pytest.mark.parametrize("changes", STOCK_REFUSES, ids=str)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_values_refused_by_stock_config_are_refused(backbone: str, changes: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=r"\w") as stock:
        stock_config(backbone, **changes)
    with pytest.raises(stock.type):
        mixed_config(backbone, {}, **changes)
