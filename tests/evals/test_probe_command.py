"""`crosshead probe`: the figures, their plots and refused arguments."""

import json
from itertools import product
from xml.etree import ElementTree

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import crosshead
import toys
from broken import run
from crosshead.conversion.compress.layer_probe import lines
from crosshead.evals.probe.plot import line_plot
from tiers import first
from toy_checkpoints import write_stock
from toy_eval import write_scorable

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
GPT2 = {"vocab_size": 61, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1}
SVG = "{http://www.w3.org/2000/svg}"
SMALL = ["--windows", "2", "--length", "32"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_stock(folder / "source", "Qwen3", **HEADS)
    write_stock(folder / "single", num_key_value_heads=1)
    write_scorable(toys.stock_model("Llama"), folder / "one")
    write_scorable(toys.mixed_model("Llama", {"knocking": {}}), folder / "two")
    damaged = toys.stock_model("Llama")
    damaged.model.norm.weight.data[0] = torch.nan
    write_scorable(damaged, folder / "damaged")
    write_scorable(GPT2LMHeadModel(GPT2Config(**GPT2)), folder / "gpt2")
    return folder


@pytest.fixture
def workdir(models, tmp_path, monkeypatch):
    for model in models.iterdir():
        (tmp_path / model.name).symlink_to(model)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run_cli(capfd, monkeypatch):
    return lambda *arguments: run(capfd, monkeypatch, ["probe", *arguments])


def points_per_line(picture):
    """Return the number of points of each named line in an SVG plot."""
    names = json.loads(picture.with_suffix(".json").read_text())
    names = names["models"] if "models" in names else lines(names)
    groups = {each.get("id"): each for each in ElementTree.parse(picture).iter(f"{SVG}g")}
    return [len(groups[name].find(f"{SVG}path").get("d").split()) // 3 for name in names]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["_model", r"a$b$\foo"])
def test_plot_legend_shows_names_verbatim(name):
    assert f">{name}<" in line_plot({name: [(0, 1.0), (1, 2.0)]}, "heads", "loss")


def test_heads_probe_of_two_models(workdir, run_cli):
    status, out, err = run_cli("heads", "one", "two", "--draws", "2", *SMALL, "--out", "found.json")
    assert (status, err) == (0, "")
    report = json.loads((workdir / "found.json").read_text())
    assert report["models"].keys() == {"one", "two"}
    assert [row["masked"] for row in report["models"]["one"]] == [0, 1, 2, 3]
    for model in ("one", "two"):
        (summary,) = (row for row in out.splitlines() if row.startswith(f"{model}:"))
        assert all(f"{row['loss']:.4f}" in summary for row in report["models"][model])
    assert "found.json" in out and "found.svg" in out
    assert points_per_line(workdir / "found.svg") == [4, 4]


def test_windows_have_at_most_the_context_by_default(workdir, run_cli):
    text = workdir / "long.txt"
    text.write_text("A short context limits the windows. " * 200)
    assert run_cli("heads", "one", "--draws", "1", "--text", text.name, "--windows", "1")[0] == 0
    assert json.loads((workdir / "heads.json").read_text())["length"] == 128
    assert run_cli("layers", "source", "--method", "svd", "--text", text.name)[0] == 0
    assert json.loads((workdir / "layers.json").read_text())["tokens"] == 128


@pytest.mark.parametrize("method", first(["svd", "aligned"]))
def test_layers_probe_measures_each_layer(method, workdir, run_cli):
    status, _, err = run_cli("layers", "source", "--method", method, *SMALL, "--out", "found.json")
    assert (status, err) == (0, "")
    report = json.loads((workdir / "found.json").read_text())
    assert report["rises"].keys() == {"0", "1"}
    assert report["rises"]["1"]["key"].keys() == {"1", "2", "3"}
    assert points_per_line(workdir / "found.svg") == [2] * 6


def test_budget_probe_of_key_value_heads(workdir, run_cli):
    status, out, err = run_cli("budget", "source", "--method", "svd", *SMALL, "--out", "found.json")
    assert (status, err) == (0, "")
    report = json.loads((workdir / "found.json").read_text())
    curve = report["curve"]
    assert len(curve) > 3 and all(point["cache"] <= point["budget"] for point in curve)
    caches = [point["cache"] for point in curve]
    assert caches == sorted(set(caches))
    rises = {(int(layer), side): counts for layer, sides in report["rises"].items() for side, counts in sides.items()}
    assert all(rise > 0 for counts in rises.values() for rise in counts.values())  # rises are divergences
    for point in curve:
        chosen = [(layer, side, point[f"{side}_heads"][layer]) for layer, side in rises]
        expected = sum(rises[layer, side].get(str(count), 0) for layer, side, count in chosen)
        assert point["expected_rise"] == pytest.approx(expected, abs=1e-5)
    groups = {group.get("id") for group in ElementTree.parse(workdir / "found.svg").iter(f"{SVG}g")}
    assert "expected" in groups
    assert "wrote found.json" in out


def test_budget_probe_of_active_heads(workdir, run_cli):
    """Each budget gets the counts of active heads with the smallest sum of measured rises."""
    status, out, err = run_cli("budget", "source", "--active", *SMALL, "--out", "found.json")
    assert (status, err) == (0, "")
    report = json.loads((workdir / "found.json").read_text())
    assert report["heads"] == 8 and report["method"] == "calibrated"
    rises = {
        layer: {8: 0.0} | {int(n): rise for n, rise in report["rises"][layer]["active"].items()} for layer in "01"
    }
    assert [*rises["0"]] == [8, 1, 3, 4, 5, 7]
    expected: list[float] = []
    for budget in range(15, 100, 5):
        affordable = [
            rises["0"][first] + rises["1"][second]
            for first, second in product(rises["0"], rises["1"])
            if (first + second) / 16 <= budget / 100
        ]
        if not expected or min(affordable) < expected[-1]:
            expected.append(min(affordable))
    assert [point["expected_rise"] for point in report["curve"]] == pytest.approx(expected, abs=1e-5)
    for point in report["curve"]:
        assert point["active"] == sum(point["active_heads"]) / 16 <= point["budget"]
        chosen = sum(rises[layer][count] for layer, count in zip("01", point["active_heads"], strict=True))
        assert point["expected_rise"] == pytest.approx(chosen, abs=1e-5)
    assert f"{report['curve'][0]['active']:g}: " in out


CASES = {
    "no such model": (["heads", "nowhere/at/all"], 1, "'nowhere/at/all'"),
    "no model": (["heads"], 2, "probe heads"),
    "another ending": (["heads", "one", "--out", "found.txt"], 1, ".json"),
    "no folder": (["heads", "one", "--out", "no/found.json"], 1, "no/found.json"),
    "already there": (["heads", "one", "--out", "there.json"], 1, "there.json"),
    "no text": (["heads", "one", *SMALL, "--text", "none.txt"], 1, "none.txt"),
    "no draws": (["heads", "one", "--draws", "0"], 2, "--draws"),
    "weights that are not finite": (["heads", "one", "damaged", *SMALL], 1, "the loss of damaged is nan"),
    "another family": (["heads", "one", "gpt2", *SMALL], 1, "model_type='gpt2'"),
    "another method": (["layers", "source", "--method", "magic"], 1, "method='magic'"),
    "beyond the context": (["heads", "one", "--length", "129"], 1, "--length 129"),
    "beyond its context": (["layers", "source", "--length", "129"], 1, "--length 129"),
    "a mixed model": (["layers", "./two"], 1, "two has model_type='crosshead_llama'"),
    "one head for a budget": (["budget", "single", *SMALL], 1, "KV head"),
    "a method of other heads": (["budget", "source", "--active", "--method", "svd"], 1, "--method svd"),
    "a saved calibration": (
        ["budget", "source", "--active", *SMALL, "--calibration", "m.safetensors"],
        1,
        "m.safetensors",
    ),
    "one head": (["layers", "single", *SMALL], 1, "KV head"),
    "an empty text": (["layers", "source", *SMALL, "--text", "empty.txt"], 1, "empty.txt"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_arguments_give_one_line_and_no_files(case, workdir, run_cli):
    arguments, expected, words = CASES[case]
    (workdir / "empty.txt").write_text("")
    (workdir / "there.json").write_text("{}")
    before = sorted(path.name for path in workdir.iterdir())
    status, _, err = run_cli(*arguments)
    assert status == expected
    assert words in err
    assert expected != 1 or err.count("\n") == 1
    assert sorted(path.name for path in workdir.iterdir()) == before


@pytest.mark.parametrize("measured", ["heads", "layers"])
def test_interrupt_or_full_disk_leaves_no_files(measured, workdir, run_cli, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    def full(*_):
        raise OSError(28, "No space left on device")

    subject = {"heads": ["one"], "layers": ["source", "--method", "svd"]}[measured]
    command = [measured, *subject, *SMALL, "--out", "found.json"]
    before = sorted(path.name for path in workdir.iterdir())
    with monkeypatch.context() as broken:
        broken.setattr("crosshead.CrossheadLlamaForCausalLM.forward", stopped)
        broken.setattr("transformers.LlamaForCausalLM.forward", stopped)
        broken.setattr("crosshead.conversion.compress.layer_probe.measure_losses", stopped)
        status, out, err = run_cli(*command)
        assert (status, out, err.count("\n")) == (130, "", 1)
    with monkeypatch.context() as broken:
        broken.setattr("pathlib.Path.replace", full)
        status, out, err = run_cli(*command)
        assert (status, out) == (1, "")
        assert err.startswith("crosshead: error: found.json") and err.count("\n") == 1
    assert sorted(path.name for path in workdir.iterdir()) == before


def test_layer_probe_matches_loss_of_converted_model(workdir):
    """The measured rise of one layer equals the rise of the loss of the model that `convert` writes."""
    import torch
    from torch.nn import functional
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from crosshead.conversion.calibration.text import HELD_OUT, default_documentation, default_text, windows
    from crosshead.conversion.compress.layer_probe import probe_layers

    report = probe_layers("source", method="svd", length=32, count=3)
    tokenizer, prose = AutoTokenizer.from_pretrained("source"), default_text()
    prose = prose[: int(len(prose) * HELD_OUT)]
    parts = (prose, 2), (default_documentation(), 1)
    tokens = torch.cat([windows(tokenizer, text, 32, number, 61) for text, number in parts])

    def loss(folder):
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            logits = model(tokens).logits[:, ::2]  # every other position is scored
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1::2].flatten()).item()

    assert report["loss"] == pytest.approx(loss("source"), rel=1e-5)
    for layer, side, count in ((0, "key", 2), (1, "value", 3)):
        options = {"norm": False, "layers": [layer], f"{side}_heads": count, "on": [side], "method": "svd"}
        crosshead.convert("source", f"made{layer}", {"explicit": options}, verify=False)
        rise = report["rises"][str(layer)][side][str(count)]
        assert rise == pytest.approx(loss(f"made{layer}") - loss("source"), abs=2e-5)
        assert rise != 0


@pytest.mark.parametrize("given", [False, True])
def test_budget_expectation_matches_conversion_plan(given, workdir):
    from crosshead.conversion.compress.auto_layers import TRIAL_LENGTH, TRIALS
    from crosshead.conversion.compress.layer_probe import probe_budget

    text = workdir / "prose.txt" if given else None
    if given:
        text.write_text("a quick brown fox jumps over the lazy dog, and then it sleeps; " * 200)
    length = 128  # the context
    report = probe_budget("source", method="svd", text=text, length=length, count=TRIALS * TRIAL_LENGTH // length)
    options = {"cache": "70%", "verify": False, "plan_only": True} | ({"calibration": text} if given else {})
    planned = crosshead.convert("source", "planned", {"explicit": {"method": "svd"}}, **options)["chosen"]
    point = next(each for each in reversed(report["curve"]) if each["budget"] <= 0.7)
    assert point["expected_rise"] == pytest.approx(planned["expected_divergence"], abs=2e-6)
    assert [*point["key_heads"]] == [*planned["key_heads"]] and [*point["value_heads"]] == [*planned["value_heads"]]
