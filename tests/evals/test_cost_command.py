"""`crosshead cost`: sources, report, table and refused arguments."""

import json

import pytest
from safetensors.torch import load_file

import gguf_toys
import t5_toys
import toys
import transnext_toys
from broken import edit_json, run
from crosshead import CrossheadTransNextConfig
from crosshead.evals.cost.report import cost_report
from hub_client import hub_with
from hub_server import COMMIT, Repository
from toy_checkpoints import write_stock


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    write_stock(tmp_path / "source", "Qwen3")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run_cli(capfd, monkeypatch):
    return lambda command: run(capfd, monkeypatch, command)


@pytest.fixture
def report(run_cli):
    def ask(command):
        status, out, err = run_cli(f"cost {command} --json")
        assert (status, err) == (0, "")
        return json.loads(out)

    return ask


def expected(name, mixers, length=128, **changes):  # the context of the toys, less than 4,096
    config = toys.mixed_config("Qwen3", mixers, **changes)
    return {"model": name} | cost_report(config, length)


@pytest.mark.parametrize(
    "mixer",
    [
        "explicit:key_heads=1,value_heads=50%,method=svd",
        "mixture:active_heads=75%",
        "knocking:form=linear,on=key+value,layers=1 --mixer talking",
        "differential:version=2",
        "differential:half_values=true",
    ],
)
def test_cost_with_mixer_equals_cost_of_converted_model(workdir, run_cli, report, mixer):
    assert run_cli(f"convert source made --mixer {mixer} --no-verify")[0] == 0
    before, after = report(f"source --mixer {mixer} --length 7"), report("made --length 7")
    assert before | {"model": "made"} == after
    assert before["mixers"] == json.loads((workdir / "made" / "config.json").read_text())["mixers"]


@pytest.mark.slow
def test_kv_bytes_match_conversion_report(workdir, run_cli, report):
    status, out, _ = run_cli("convert source made --mixer explicit:key_heads=1,method=svd --dtype bfloat16 --json")
    assert status == 0
    measured, figures = json.loads(out)["verification"], report("made")
    assert figures["cost"]["kv_bytes_per_token"] == measured["kv_bytes_per_token_after"]
    assert 2 * figures["stock"]["kv_bytes_per_token"] == measured["kv_bytes_per_token_before"]  # float32 source


def test_config_without_weights_is_enough(workdir, report):
    (workdir / "source" / "model.safetensors").unlink()
    for name in ("source", "source/config.json"):
        assert report(f"{name} --mixer knocking") == expected(name, {"knocking": {}})
    assert report("source") == expected("source", {})
    edit_json(workdir / "source", "config.json", dtype="bfloat16")
    assert report("source") == expected("source", {}, dtype="bfloat16")


def test_mixer_option_replaces_mechanisms_of_the_model(workdir, report):
    toys.mixed_config("Qwen3", {"talking": {}}).save_pretrained("mixed")
    assert report("mixed") == expected("mixed", {"talking": {}})
    assert report("mixed --mixer knocking") == expected("mixed", {"knocking": {}})


def test_untied_t5_head_is_counted(workdir, run_cli, report):
    t5_toys.write_t5(workdir / "untied", is_untied=True, tie_word_embeddings=False)
    stored = sum(each.numel() for each in load_file(workdir / "untied" / "model.safetensors").values())
    assert report("untied --length 7")["cost"]["parameters"] == stored
    assert run_cli("convert untied mixed --mixer knocking --no-verify")[0] == 0
    stored = sum(each.numel() for each in load_file(workdir / "mixed" / "model.safetensors").values())
    assert report("mixed --length 7")["cost"]["parameters"] == stored


def test_cost_of_gguf_file(workdir, report):
    model = gguf_toys.model("Qwen3")
    gguf_toys.write_model(workdir / "toy.gguf", model, "Qwen3")
    figures = report("toy.gguf")
    assert figures["cost"] == figures["stock"]
    assert figures["cost"]["parameters"] == sum(parameter.numel() for parameter in model.parameters())


def test_cost_of_hub_model_downloads_no_weights(workdir, run_cli, report, monkeypatch):
    config = (workdir / "source" / "config.json").read_bytes()
    repositories = {"org/toy": Repository({"config.json": config, "model.safetensors": b"never asked for"})}
    with hub_with(monkeypatch, repositories, workdir / "cache") as hub:
        assert report(f"org/toy --revision {COMMIT}") == expected("org/toy", {})
        assert report(f"org/toy@{COMMIT}") == expected(f"org/toy@{COMMIT}", {})
        assert "safetensors" not in " ".join(hub.requests)
        status, out, err = run_cli("cost org/tyo")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("crosshead: error: ") and "'org/tyo'" in err


def test_table_matches_json_report(workdir, run_cli, report):
    figures = report("source --mixer explicit:key_heads=1 --length 1024")
    status, out, err = run_cli("cost source --mixer explicit:key_heads=1 --length 1024")
    assert (status, err) == (0, "")
    rows = [row.split() for row in out.splitlines()]
    assert {"1,024", "float32"} <= set(rows[0])
    counted = {name: count for name, count in figures["cost"].items() if count or name == "new_parameters"}
    for row, (name, count) in zip(rows[1:], counted.items(), strict=True):
        change = figures["overhead"].get(name)
        cells = [f"{count:,}", f"{figures['stock'][name]:,}", *([] if change is None else [f"{change:+.2%}"])]
        assert row[-len(cells) :] == cells
    stock = run_cli("cost source --length 1024")[1].splitlines()
    assert [row.split()[-1] for row in stock[1:]] == [f"{figures['stock'][name]:,}" for name in counted]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("./none", "'./none'"),
        ("none.gguf", "none.gguf"),
        (". --mixer knocking", "config.json"),
        ("source --length 0", "length=0"),
        ("source --mixer knokcing", "'knocking'"),
        ("source --mixer explicit:key_heads=3", "mixers.explicit.key_heads=3"),
        ("source --mixer knocking --mixer knocking:form=mlp", "--mixer knocking"),
        ("source --revision main", "revision"),
        ("source/tokenizer.json", "model_type=None"),
    ],
)
def test_refused_arguments_give_one_line_error(workdir, run_cli, arguments, words):
    status, out, err = run_cli(f"cost {arguments}")
    assert (status, out) == (1, "")
    assert err.startswith("crosshead: error: ")
    assert err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize("backbone", ["T5", "Gta"])
def test_cost_of_t5_and_gta_configs(workdir, report, backbone):
    mixers = {"encoder": {"talking": {}}} if backbone == "T5" else {"talking": {}}
    config = toys.mixed_config(backbone, mixers)
    config.save_pretrained("made")
    assert report("made --length 7") == {"model": "made"} | cost_report(config, 7)
    replaced = cost_report(toys.mixed_config(backbone, {"knocking": {"form": "linear", "layers": [1]}}), 7)
    assert report("made --length 7 --mixer knocking:form=linear,layers=1") == {"model": "made"} | replaced
    assert report("made")["length"] == (128 if backbone == "Gta" else 4096)
    edit_json(workdir / "made", "config.json", n_positions=512)  # a key of published T5 configs
    assert report("made")["length"] == (128 if backbone == "Gta" else 512)


def test_cost_of_stock_t5_and_transnext(workdir, run_cli, report):
    toys.stock_config("T5").save_pretrained("t5")
    figures = report("t5 --length 7")
    assert figures["cost"] == figures["stock"] == cost_report(toys.mixed_config("T5", {}), 7)["cost"]
    assert "overhead" not in run_cli("cost t5 --length 7")[1]
    parts = {"encoder": {"talking": {}}, "cross": {"talking": {}}}
    mixed = report("t5 --length 7 --mixer talking@encoder+cross")
    assert mixed["cost"] == cost_report(toys.mixed_config("T5", parts), 7)["cost"]
    config = CrossheadTransNextConfig(**transnext_toys.SIZES, mixers=transnext_toys.ROUTED)
    config.save_pretrained("transnext")
    assert report("transnext") == {"model": "transnext"} | cost_report(config, 256)
    edit_json(workdir / "transnext", "config.json", window_size=2)
    status, out, err = run_cli("cost transnext")
    assert (status, out, err.count("\n")) == (1, "", 1) and "window_size=2" in err
