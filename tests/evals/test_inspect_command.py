"""`crosshead inspect`: the page, the JSON report and refused inputs."""

import json
import os
import re

import pytest
import torch
from huggingface_hub import constants
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForSequenceClassification

import toys
from broken import edit_json, run, snapshot
from crosshead.evals.inspect.inputs import split_text
from crosshead.evals.inspect.page import page_text, write_report
from toy_checkpoints import character_tokenizer, write_model, write_stock

TEXT = "the cat sat on the mat."


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    write_stock(tmp_path / "source", "Qwen3")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


@pytest.fixture
def run_cli(capfd, monkeypatch):
    return lambda *arguments: run(capfd, monkeypatch, ["inspect", *arguments])


def measured(run_cli, *arguments):
    status, out, err = run_cli(*arguments, "--out", "report.html")
    assert (status, err) == (0, "") and "report.json" in out and "report.html" in out
    with open("report.json", encoding="utf-8") as file:
        return json.load(file)


def test_page_contains_the_json_report_and_no_external_resources(workdir, run_cli):
    report = measured(run_cli, "source", "--text", TEXT)
    assert sorted(path.name for path in workdir.iterdir()) == ["report.html", "report.json", "source"]
    page = (workdir / "report.html").read_text(encoding="utf-8")
    assert page == page_text(report)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|\bsrc=|<link|@import|url\(|fetch\(|XMLHttp", page)
    assert "default-src 'none'" in page
    assert str(workdir) not in page
    assert not re.search(r"\{\{\w+\}\}", page)
    assert report["longest_text"] == 512
    (model,) = report["models"]
    assert (model["name"], model["layers"], model["query_heads"], model["key_value_heads"]) == ("source", 2, 4, 2)
    (text,) = model["texts"]
    assert text["name"] == TEXT
    assert "".join(text["tokens"]) == TEXT
    assert text["starts"] == list(range(len(TEXT)))
    means = [layer["mean_similarity"]["patterns"] for layer in text["layers"]]
    assert text["mean_similarity"]["patterns"] == pytest.approx(sum(means) / 2, rel=1e-4)


def test_text_with_script_tags_is_escaped_in_page(workdir, run_cli):
    (workdir / "text.txt").write_text('</script><script>alert("1")</script><!-- {{data}}')
    report = measured(run_cli, "source", "--text", "text.txt")
    page = (workdir / "report.html").read_text(encoding="utf-8")
    before, _, rest = page.partition('id="data">')
    data, _, after = rest.partition("</script>")
    assert json.loads(data) == report
    assert '"1"' not in before + after


@pytest.mark.parametrize("case", toys.CASES)
def test_report_of_every_mechanism(workdir, run_cli, case):
    model = toys.mixed_model("Qwen2", toys.CASES[case])
    write_model(model, workdir / "mixed")
    (record,) = measured(run_cli, "mixed", "--text", TEXT)["models"]
    assert record["mixers"] == model.config.mixers
    assert record["parameters"] == model.num_parameters()
    assert set(record["mechanisms"]) == set(toys.CASES[case])
    assert {matrix["mechanism"] for matrix in record["matrices"]} <= set(toys.CASES[case])
    routes = [layer["routing"] is not None for layer in record["texts"][0]["layers"]]
    assert routes == ["mixture" in toys.CASES[case]] * 2


def test_drift_is_read_from_training_json(workdir, run_cli):
    write_model(toys.mixed_model("Llama", {"knocking": {}}), workdir / "trained")
    training = workdir / "trained" / "training.json"
    assert measured(run_cli, "trained", "--text", TEXT)["models"][0]["drift"] == {}
    training.write_text(json.dumps({"metrics": {"step": 3, "drift/knocking": 0.25, "loss": 2.0}}))
    (record,) = measured(run_cli, "trained", "--text", TEXT, "--overwrite")["models"]
    assert record["drift"] == {"knocking": 0.25}
    training.write_text("[]")
    status, _, error = run_cli("trained", "--text", TEXT, "--overwrite", "--out", "report.html")
    assert status == 1 and "training.json" in error


def test_routing_load_and_scores_match_router_outputs(workdir, run_cli):
    mixers = {"mixture": {"shared_heads": 1, "active_heads": 3}}
    model = toys.mixed_model("Llama", mixers)
    write_model(model, workdir / "mixed")
    (record,) = measured(run_cli, "mixed", "--text", TEXT)["models"]
    tokens = torch.tensor([character_tokenizer()(TEXT)["input_ids"]])
    with torch.no_grad():
        scores = model(tokens, output_head_router_scores=True).head_router_scores
    for layer, probabilities in zip(record["texts"][0]["layers"], scores, strict=True):
        routing = layer["routing"]
        selected = torch.zeros_like(probabilities).scatter(-1, probabilities.topk(2, dim=-1).indices, 1.0)
        assert routing["load"] == pytest.approx([1.0, *selected[0].mean(0).tolist()], abs=1e-4)
        assert routing["mean_score"][0] is None
        assert routing["mean_score"][1:] == pytest.approx(probabilities[0].mean(0).tolist(), rel=1e-3)


def test_report_of_two_models_and_two_texts(workdir, run_cli):
    write_model(toys.mixed_model("Llama", {"differential": {}}), workdir / "mixed")
    (workdir / "other.txt").write_text("another text, in a file")
    report = measured(run_cli, "source", "mixed", "--text", TEXT, "--text", "other.txt")
    assert [model["name"] for model in report["models"]] == ["source", "mixed"]
    for model in report["models"]:
        assert [text["name"] for text in model["texts"]] == [TEXT, "other.txt"]
    labels = report["models"][1]["texts"][0]["layers"][0]["labels"]
    assert labels == ["0", "1", "softmax 0", "softmax 1", "softmax 2", "softmax 3"]


def test_report_of_one_token(workdir, run_cli):
    (text,) = measured(run_cli, "source", "--text", "a")["models"][0]["texts"]
    assert text["tokens"] == ["a"]
    assert text["layers"][0]["measures"]["entropy"] == [0.0] * 4


def test_existing_report_is_replaced_only_with_overwrite(workdir, run_cli):
    measured(run_cli, "source", "--text", TEXT)
    for name in ("report.html", "report.json"):
        before = snapshot(workdir)
        status, out, err = run_cli("source", "--text", TEXT, "--out", "report.html")
        assert (status, out) == (1, "")
        assert name in err and "--overwrite" in err and err.count("\n") == 1
        assert snapshot(workdir) == before
        (workdir / "report.html").unlink(missing_ok=True)
    assert run_cli("source", "--text", "another", "--out", "report.html", "--overwrite")[0] == 0
    assert json.loads((workdir / "report.json").read_text())["models"][0]["texts"][0]["name"] == "another"


@pytest.fixture
def broken(workdir):
    """The working folder with models and texts that cannot be shown."""
    write_stock(workdir / "short", max_position_embeddings=20)
    write_stock(workdir / "roomy", max_position_embeddings=1000)
    write_stock(workdir / "small", vocab_size=30)
    write_stock(workdir / "bare")
    for file in (workdir / "bare").glob("*token*"):
        file.unlink()
    others = {
        "gpt2": GPT2LMHeadModel(
            GPT2Config(vocab_size=61, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
        ),
        "classifier": LlamaForSequenceClassification(toys.stock_config("Llama")),
        "backbone": toys.stock_model("Llama").model,
    }
    for name, model in others.items():
        model.save_pretrained(workdir / name)
        character_tokenizer().save_pretrained(workdir / name)
    write_stock(workdir / "headless")
    edit_json(workdir / "headless", "config.json", num_hidden_layers=3)
    damaged = toys.stock_model("Llama")
    damaged.model.layers[1].self_attn.v_proj.weight.data[0, 0] = torch.nan
    write_model(damaged, workdir / "damaged")
    (workdir / "binary.txt").write_bytes(b"a\0b")
    (workdir / "latin.txt").write_bytes("für".encode("latin-1"))
    (workdir / "empty.txt").write_text(" \n")
    (workdir / "long.txt").write_text("many words " * 60)
    (workdir / "report.json.html").mkdir()
    return workdir


REFUSED = [
    (["source", "--text", " "], "''"),
    (["source", "--text", "empty.txt"], "empty.txt"),
    (["roomy", "--text", "long.txt"], "660"),
    (["short", "--text", TEXT], "short takes at most 20"),
    (["source", "short", "--text", TEXT], "short takes at most 20"),
    (["source", "--text", "none.txt"], "none.txt"),
    (["source", "--text", "source/none"], "source/none"),
    (["source", "--text", "binary.txt"], "binary.txt"),
    (["source", "--text", "latin.txt"], "UTF-8"),
    (["source", "--text", TEXT, "--text", TEXT], f"{TEXT}: give one of them in a file with another name"),
    (["small", "--text", "[z]"], "tokenizer of small"),
    (["bare", "--text", TEXT], "tokenizer of bare"),
    (["gpt2", "--text", TEXT], "model_type='gpt2'"),
    (["classifier", "--text", TEXT], "LlamaForSequenceClassification"),
    (["backbone", "--text", TEXT], "LlamaModel"),
    (["headless", "--text", TEXT], "model.layers.2.input_layernorm.weight"),
    (["source", "damaged", "--text", TEXT], f"decoder layer 1 of damaged computes nan or inf on '{TEXT}'"),
    (["./none", "--text", TEXT], "'./none'"),
    (["org/none", "--text", TEXT], "'org/none'"),
    (["source", "--text", TEXT, "--out", "report"], ".html"),
    (["source", "--text", TEXT, "--out", "none/report.html"], "none/report.html"),
    (["source", "--text", TEXT, "--out", "report.json.html"], "report.json.html"),
]


def test_refused_inputs_give_one_line_and_no_files(broken, run_cli):
    before = snapshot(broken)
    for arguments, words in REFUSED:
        out_option = [] if "--out" in arguments else ["--out", "report.html"]
        status, out, err = run_cli(*arguments, *out_option)
        assert (status, out) == (1, ""), arguments
        assert err.startswith("crosshead: error: ") and err.count("\n") == 1, err
        assert words in err
        assert snapshot(broken) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["source", "--out", "report.html"], "--text"),
        (["source", "--text", TEXT], "--out"),
        (["--text", TEXT, "--out", "report.html"], "model"),
        (["source", "--texts", TEXT, "--out", "report.html"], "--text"),
        (["a", "b", "c", "--text", TEXT, "--out", "report.html"], "(c)"),
    ],
)
def test_wrong_usage_exits_with_status_2(workdir, run_cli, arguments, words):
    status, out, err = run_cli(*arguments)
    assert (status, out) == (2, "")
    assert words in err


def test_full_disk_leaves_no_report(workdir, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    report = {"longest_text": 512, "top": 5, "models": []}
    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(ValueError, match=r"report\.json"):
        write_report(report, workdir / "report.html")
    assert [path.name for path in workdir.iterdir()] == ["source"]


def test_unwritable_output_folder_is_refused(workdir, run_cli, monkeypatch):
    (workdir / "closed").mkdir()
    monkeypatch.setattr(os, "access", lambda folder, _: folder.name != "closed")  # root may write anywhere
    status, _, err = run_cli("source", "--text", TEXT, "--out", "closed/report.html")
    assert status == 1
    assert err.startswith("crosshead: error: closed ") and err.count("\n") == 1


def test_split_text_keeps_spaces_and_offsets():
    text = "Ein  Käse 🧀!"
    spans = [(0, 0), (0, 3), (5, 9), (10, 11), (10, 11), (10, 11), (11, 12), (0, 0)]
    names = ["<s>", *"abcdef", "</s>"]
    pieces, starts = split_text(text, spans, names)
    assert pieces == ["<s>", "Ein", "  Käse", " 🧀", "", "", "!", "</s>"]
    assert starts == [0, 0, 3, 9, 11, 11, 11, 12]
