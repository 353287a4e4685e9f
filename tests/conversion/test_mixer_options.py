"""Text from a command line or a recipe becomes typed options."""

import pytest

import crosshead
import toys
from crosshead.common.errors import ConversionError
from crosshead.conversion.mixers import read_mixers, read_request
from crosshead.conversion.options import Options, read_recipe, split_argument, with_recipe

FITTED = {"router": "two_stage", "gate": "binary", "shared_heads": 0}
"""Options of a mixture whose router is fitted, which is the default."""
LAYOUTS = toys.mixed_config("Llama", {}, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=3).layouts()


@pytest.mark.parametrize(
    ("argument", "mixers"),
    [
        ("knocking", {"knocking": {}}),
        ("knocking:form=linear,on=query+key+value", {"knocking": {"form": "linear", "on": ["query", "key", "value"]}}),
        ("knocking:layers=0+2", {"knocking": {"layers": [0, 2]}}),
        ("talking:softmax_heads=16,dynamic=key_logits", {"talking": {"softmax_heads": 16, "dynamic": ["key_logits"]}}),
        ("explicit:key_heads=50%,value_heads=3", {"explicit": {"norm": False, "key_heads": 2, "value_heads": 3}}),
        ("explicit:value_heads=50%,groups=2", {"explicit": {"norm": False, "value_heads": 2, "groups": 2}}),
        ("explicit:norm=true,key_heads=1+2+75%", {"explicit": {"norm": True, "key_heads": [1, 2, 3]}}),
        ("mixture:active_heads=75%", {"mixture": {**FITTED, "active_heads": 6}}),
        ("mixture:active_heads=75%,shared_heads=2", {"mixture": {**FITTED, "active_heads": 6, "shared_heads": 2}}),
        *(
            (
                f"mixture:active_heads=75%,{paper}",
                {"mixture": {"router": "query_norm", "gate": "binary", "active_heads": 6, "shared_heads": 4}},
            )
            for paper in ("method=paper", "shared=first", "router=query_norm")
        ),
        (
            "mixture:active_heads=50%,router=two_stage,method=paper,balance_weight=0.1",
            {"mixture": {"router": "two_stage", "gate": "binary", "active_heads": 4, "balance_weight": 0.1}},
        ),
        (
            "mixture:active_heads=75%+50%+2,method=paper",
            {
                "mixture": {
                    "router": "query_norm",
                    "gate": "binary",
                    "active_heads": [6, 4, 2],
                    "shared_heads": [4, 2, 1],
                }
            },
        ),
        ("mixture:active_heads=1%", {"mixture": {**FITTED, "active_heads": 1}}),
    ],
)
def test_mixer_arguments_become_typed_options(argument, mixers):
    name, options = split_argument(argument)
    assert read_mixers({name: options}, LAYOUTS).mixers == mixers


def test_groups_with_calibrated_shared_heads_are_refused():
    mixers = {"explicit": {"groups": 2}, "mixture": {"active_heads": 6, "shared": "calibrated"}}
    with pytest.raises(ConversionError, match=r"groups=2 .*shared='calibrated'.*shared=first"):
        read_mixers(mixers, LAYOUTS)


def test_python_values_pass_unchanged():
    mixers = {"explicit": {"key_heads": [1, 2, 4], "method": "svd"}, "mixture": {"active_heads": 8, "layers": [1]}}
    request = read_mixers(mixers, LAYOUTS)
    assert request.mixers["explicit"] == {"norm": False, "key_heads": [1, 2, 4]}
    assert request.mixers["mixture"]["layers"] == [1]
    assert request.choices == {"explicit": {"method": "svd"}, "mixture": {"method": "calibrated", "shared": "first"}}


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("knoking", ["'knoking'", "'knocking'"]),
        ("knocking:from=linear", ["'from'", "'form'"]),
        ("explicit:methd=svd", ["'methd'", "'method'"]),
        ("explicit:method=pca", ["method='pca'", "'svd'"]),
        ("mixture:active_heads=75%,shared=most", ["shared='most'", "'calibrated'"]),
        ("mixture:active_heads=175%", ["'175%'"]),
        ("mixture:active_heads=75%,gate=weighted", ["gate='weighted'", "method=paper"]),
        ("mixture:active_heads=75%,router=query_norm,method=calibrated", ["router='query_norm'", "method=paper"]),
        ("mixture:active_heads=x%", ["'x%'"]),
        ("knocking:form", ["'form'", "key=value"]),
        ("knocking:=linear", ["'=linear'", "key=value"]),
        ("knocking:form=mlp,form=gate", ["'form'"]),
    ],
)
def test_invalid_mixer_arguments_are_refused(argument, words):
    with pytest.raises(ConversionError) as caught:
        name, options = split_argument(argument)
        read_mixers({name: options}, LAYOUTS)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


RECIPE = """
mixers:
  knocking:
    form: linear
    on: [query, key]
  mixture: {active_heads: 75%, layers: [0, 1]}
vocab_size: 128
calibration: texts/prose.txt
allow_inexact: true
"""


def test_recipe_is_read_and_overridden_by_command_line(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    mixers, options = with_recipe(path, [], {"seed": None, "vocab_size": 256, "allow_inexact": False})
    assert read_mixers(mixers, LAYOUTS).mixers["knocking"] == {"form": "linear", "on": ["query", "key"]}
    assert read_mixers(mixers, LAYOUTS).mixers["mixture"]["layers"] == [0, 1]
    assert options == {"vocab_size": 256, "calibration": tmp_path / "texts" / "prose.txt", "allow_inexact": True}


def test_command_line_mixers_replace_recipe_mixers(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    assert with_recipe(path, ["talking"], {})[0] == {"talking": {}}


def test_command_line_budget_replaces_recipe_budget(tmp_path):
    path = tmp_path / "recipe.yaml"
    for own in ("cache: 75%", "layers: auto\nbudget: 0.75\nmixers: {explicit: {}}"):
        path.write_text(f"{own}\nseed: 1\n")
        options = Options.of(with_recipe(path, [], {"cache": "50%"})[1])
        assert (options.layers, options.budget, options.seed) == ("auto", 0.5, 1)
        assert Options.of(with_recipe(path, [], {"active": "50%"})[1]).budget == 0.75


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mixers: [knocking]", ["mapping"]),
        ("mixer: {}", ["'mixer'", "'mixers'"]),
        ("just words", ["options"]),
        ("a: [", ["YAML"]),
        ("dtype: [a, b]", ["dtype"]),
        ("{" * 5000, ["YAML"]),
    ],
)
def test_invalid_recipes_are_refused(text, words, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConversionError) as caught:
        read_recipe(path)
    assert "\n" not in str(caught.value)
    for word in [*words, "recipe.yaml"]:
        assert word in str(caught.value)


def test_missing_recipe_is_refused(tmp_path):
    with pytest.raises(ConversionError, match=r"none\.yaml"):
        read_recipe(tmp_path / "none.yaml")


@pytest.mark.parametrize("backbone", ["Llama", "T5"])
@pytest.mark.parametrize("mixers", [["knocking"], "knocking", 5])
def test_mixers_that_are_no_mapping_are_refused(mixers, backbone):
    with pytest.raises(ConversionError, match=r"mixers=.*mapping"):
        read_request(mixers, toys.mixed_config(backbone, {}))


@pytest.mark.parametrize("backbone", ["Llama", "T5"])
@pytest.mark.parametrize("key", [5, None, ("a", "b")], ids=str)
def test_keys_that_are_no_strings_are_refused(key, backbone):
    with pytest.raises(ConversionError, match=r"mixers has the key .*name of a mechanism"):
        read_request({key: {}}, toys.mixed_config(backbone, {}))


def test_duplicate_mixer_arguments_are_refused():
    with pytest.raises(ConversionError, match="knocking"):
        with_recipe(None, ["knocking", "knocking:form=linear"], {})


@pytest.mark.parametrize("device", ["cuda", "tpu"])
def test_unavailable_device_is_refused(device, monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConversionError, match=device):
        Options.of({"device": device})
    with pytest.raises(ConversionError, match=device):
        crosshead.verify(tmp_path / "source", tmp_path / "made", device=device)
