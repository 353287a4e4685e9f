"""`crosshead eval` refuses bad models, tasks and options with one clear line each."""

import json

import datasets
import pytest
import torch
from huggingface_hub import constants
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

import toys
from broken import edit_json, run
from crosshead.evals.harness import evaluate as harness
from toy_checkpoints import write_stock
from toy_eval import CHOICE, ROLLING, WRITTEN, write_scorable, write_task

SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 61}
T5 = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 61}
OFFLINE = "--suite offline"
MINE = "--include-path mine --tasks"
ITEM = {"text": "the cat", "choices": ["a", "b"], "label": 0}


pytestmark = pytest.mark.xdist_group("eval_errors")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_scorable(toys.stock_model("Llama"), folder / "model")
    write_scorable(toys.stock_model("Qwen3"), folder / "qwen")
    write_scorable(BertForMaskedLM(BertConfig(**SMALL)), folder / "bert")
    write_scorable(T5ForConditionalGeneration(T5Config(**T5)), folder / "t5")
    write_scorable(LlamaForSequenceClassification(toys.stock_config("Llama")), folder / "classifier")
    write_stock(folder / "endless")
    for model, name in (("model", "mute"), ("qwen", "empty")):  # without tokenizer
        toys.stock_model({"model": "Llama", "qwen": "Qwen3"}[model]).save_pretrained(folder / name)
    write_scorable(toys.stock_model("Llama", vocab_size=20), folder / "small")
    write_scorable(toys.stock_model("Llama"), folder / "foreign")
    auto = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    edit_json(folder / "foreign", "config.json", model_type="own", auto_map=auto)
    (folder / "foreign" / "own.py").write_text("raise SystemExit('this ran')\n")
    write_scorable(toys.stock_model("Llama"), folder / "deeper")
    edit_json(folder / "deeper", "config.json", num_hidden_layers=3)
    broken = toys.stock_model("Llama")
    torch.nn.init.constant_(broken.model.norm.weight, torch.nan)
    write_scorable(broken, folder / "broken")
    torch.nn.init.constant_(broken.model.norm.weight, 1e6)
    write_scorable(broken, folder / "loud")
    write_scorable(toys.stock_model("Llama"), folder / "strange")
    edit_json(folder / "strange", "config.json", model_type="strange")
    write_scorable(toys.stock_model("Llama"), folder / "weightless")
    (folder / "weightless" / "model.safetensors").rename(folder / "weightless" / "pytorch_model.bin")
    return folder


@pytest.fixture
def workdir(models, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for model in models.iterdir():
        (tmp_path / model.name).symlink_to(model)
    (tmp_path / "file.txt").write_text("")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "dit").mkdir()
    (tmp_path / "dit" / "config.json").write_text('{"_class_name": "DiTTransformer2DModel"}')
    (tmp_path / "done.json").write_text("{}")
    mine = tmp_path / "mine"
    write_task(mine, "blank", ROLLING, [{"text": "the cat"}, {"text": " \n"}])
    write_task(mine, "no_answer", CHOICE, [ITEM, ITEM | {"choices": ["a", ""]}])
    write_task(mine, "endless_answer", CHOICE, [ITEM | {"choices": ["a", "b " * 200]}])
    write_task(mine, "long_answer", WRITTEN, [ITEM], generation_kwargs={"until": ["."], "max_gen_toks": 128})
    write_task(mine, "runs_code", WRITTEN, [ITEM], unsafe_code=True)
    write_task(mine, "far_away", CHOICE, dataset_path="org/none", dataset_kwargs=None)
    write_task(mine, "no_file", CHOICE, dataset_kwargs={"data_files": {"test": "none.jsonl"}})
    classes = [ITEM | {"choices": ["a", "b", "c"], "label": label} for label in range(3)]
    write_task(mine, "classes", CHOICE, classes, metric_list=[{"metric": "f1"}])
    (mine / "both.yaml").write_text("group: both\ntask: [blank, no_answer]\n")
    (mine / "hidden.yaml").write_text("group: hidden\ntask: [runs_code]\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


CASES = {
    f"./none {OFFLINE}": ["'./none'"],
    f"file.txt {OFFLINE}": ["'file.txt'"],
    f"nothing {OFFLINE}": ["nothing", "config.json"],
    f"dit {OFFLINE}": ["dit", "diffusers"],
    f"org/none {OFFLINE}": ["'org/none'"],
    f"bert {OFFLINE}": ["bert", "BertForMaskedLM"],
    f"t5 {OFFLINE}": ["t5", "T5ForConditionalGeneration"],
    f"classifier {OFFLINE}": ["classifier", "LlamaForSequenceClassification"],
    f"strange {OFFLINE}": ["strange", "config"],
    f"mute {OFFLINE}": ["mute", "tokenizer"],
    f"empty {OFFLINE}": ["empty", "tokenizer"],
    f"endless {OFFLINE}": ["endless", "bos_token", "eos_token"],
    f"small {OFFLINE}": ["tokenizer", "39", "19"],
    f"foreign {OFFLINE}": ["foreign", "--trust-remote-code"],
    f"broken {OFFLINE}": ["item 0", "crosshead_grammar", "nan"],
    f"loud {OFFLINE}": ["perplexity", "weights"],
    f"deeper {OFFLINE}": ["deeper", "model.layers.2"],
    f"weightless {OFFLINE}": ["weightless"],
    "model --suite ofline": ["'ofline'", "kha", "mea-reasoning", "'offline'"],
    f"model {OFFLINE} --compare": ["compar", "two models"],
    f"model {OFFLINE} --limit 0": ["limit=0"],
    f"model {OFFLINE} --batch-size many": ["batch_size='many'"],
    f"model {OFFLINE} --batch-size 0": ["batch_size=0"],
    f"model {OFFLINE} --backend tgi": ["backend='tgi'", "hf or vllm"],
    f"model {OFFLINE} --backend vllm": ["pip install vllm"],
    f"model {OFFLINE} --out done.json": ["done.json", "--overwrite"],
    f"model {OFFLINE} --out far/away.json": ["far/away.json"],
    "model --tasks blank --include-path none": ["--include-path none"],
    f"model {MINE} blank": ["item 1", "blank"],
    f"model {MINE} no_answer": ["item 1", "no_answer"],
    f"model {MINE} endless_answer": ["item 0", "endless_answer", "128"],
    f"model {MINE} long_answer": ["long_answer", "128"],
    f"model {MINE} runs_code": ["runs_code", "--confirm-run-unsafe-code"],
    f"model {MINE} far_away": ["far_away", "offline"],
    f"model {MINE} no_file": ["no_file", "none.jsonl", "current directory"],
    f"model {MINE} classes": ["classes", "multiclass", "metrics"],
    "model --tasks ,": ["--tasks"],
}
"""Arguments of `crosshead eval` -> words of the one-line error."""
OF_THE_HARNESS = {
    f"model {MINE} hidden": ["runs_code", "--confirm-run-unsafe-code"],
    f"model {MINE} blank,both": ["blank"],
    "model --tasks helaswag": ["'helaswag'", "'hellaswag'"],
}
"""Like CASES; here the harness reads all of its own tasks, which takes ten seconds and more."""


@pytest.mark.parametrize("command", [*CASES, *(pytest.param(each, marks=pytest.mark.slow) for each in OF_THE_HARNESS)])
def test_refused_arguments_give_one_line_error(workdir, capfd, monkeypatch, command):
    status, out, err = run(capfd, monkeypatch, f"eval {command}")
    assert (status, out) == (1, "")
    assert err.startswith("crosshead: error: ")
    assert err.count("\n") == 1
    assert all(word in err for word in (CASES | OF_THE_HARNESS)[command]), err
    assert not (workdir / "eval.json").exists()


def test_suite_together_with_tasks_is_refused(workdir, capfd, monkeypatch):
    status, out, err = run(capfd, monkeypatch, "eval model --suite quick --tasks piqa")
    assert (status, out) == (2, "")
    assert "--suite" in err and "--tasks" in err


def test_trust_remote_code_runs_model_code(workdir, capfd, monkeypatch):
    status, _, err = run(capfd, monkeypatch, f"eval foreign {OFFLINE} --trust-remote-code")
    assert "this ran" in f"{status}{err}"


def test_scores_are_kept_if_a_later_model_fails(workdir, capfd, monkeypatch):
    status, out, err = run(capfd, monkeypatch, f"eval model deeper {OFFLINE} --compare")
    assert (status, out) == (1, "") and "deeper" in err
    report = json.loads((workdir / "eval.json").read_text())
    assert [model["model"] for model in report["models"]] == ["model"]
    assert report["compared"] == []


def test_interrupt_after_a_model_says_what_is_saved(workdir, capfd, monkeypatch):
    """The second model is interrupted: the file has the scores of the first, and the message says so."""
    score = harness._score

    def interrupted(opened, *arguments):
        if opened.name == "qwen":
            raise KeyboardInterrupt
        return score(opened, *arguments)

    monkeypatch.setattr(harness, "_score", interrupted)
    status, _, err = run(capfd, monkeypatch, f"eval model qwen {OFFLINE} --limit 2")
    message = "crosshead: interrupted: eval.json has the scores of 1 of 2 models"
    assert (status, err.splitlines()[-1]) == (130, message)
    report = json.loads((workdir / "eval.json").read_text())
    assert [model["model"] for model in report["models"]] == ["model"]
