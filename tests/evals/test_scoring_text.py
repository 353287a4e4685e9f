"""`crosshead eval --data` on texts: classifiers, regressions, masked language models and T5."""

import json
import shutil
from itertools import pairwise

import pytest
import torch
import transformers
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import crosshead
import scoring_toys
import toys
from broken import run
from crosshead.evals.open_model import open_config, with_tokenizer
from crosshead.evals.scoring import windows
from crosshead.evals.scoring.evaluate import score_data
from scoring_toys import classes, labelled, write_rows

COUNT = scoring_toys.COUNT


@pytest.fixture
def run_eval(capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def ask(command):
        status, out, err = run(capfd, monkeypatch, f"eval {command} --overwrite")
        assert (status, err) == (0, "")
        return json.loads((tmp_path / "eval.json").read_text()), out

    return ask


def scores(report, model=0):
    return {row["metric"]: row["score"] for row in report["models"][model]["scores"]}


def logits_of(folder, *texts):
    """Return logits (rows, classes), computed row by row without padding."""
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModelForSequenceClassification.from_pretrained(folder),
    )
    with torch.no_grad():
        encoded = [tokenizer(*each, return_tensors="pt") for each in zip(*texts, strict=True)]
        return torch.cat([model.eval()(**each).logits for each in encoded])


@pytest.mark.parametrize("suffix", ["tsv", pytest.param("jsonl", marks=pytest.mark.slow)])
def test_classifier_scores_match_sklearn(suffix, run_eval, tmp_path):
    scoring_toys.write_classifier(tmp_path / "model", num_labels=2)
    labels = classes(COUNT, 2)
    rows = labelled(labels)
    write_rows(tmp_path / f"rows.{suffix}", rows)
    report, out = run_eval(f"model --data rows.{suffix}")
    predictions = logits_of(tmp_path / "model", [row["sentence"] for row in rows]).argmax(1).tolist()
    assert 0 < sum(predictions) < COUNT
    metrics = scores(report)
    assert metrics["accuracy"] == accuracy_score(labels, predictions)
    assert metrics["f1"] == pytest.approx(f1_score(labels, predictions))
    assert metrics["matthews_correlation"] == pytest.approx(matthews_corrcoef(labels, predictions))
    assert report["data"]["name"] == f"rows.{suffix}" and len(report["data"]["sha256"]) == 64
    assert f"{metrics['accuracy']:.4f}" in out and f"rows.{suffix}" in out and "wrote eval.json" in out
    assert (
        run_eval(f"model --data rows.{suffix} --batch-size 1")[0]["models"][0]["scores"][0]["score"]
        == metrics["accuracy"]
    )
    assert [row["items"] for row in run_eval(f"model --data rows.{suffix} --limit 5")[0]["models"][0]["scores"]] == [
        5
    ] * 4


def test_text_pairs_and_class_names(run_eval, tmp_path):
    """The second text has another token type; a label is matched to class names before class numbers."""
    names = {0: "no", 1: "maybe", 2: "2", 3: "yes"}
    scoring_toys.write_classifier(tmp_path / "stock", num_labels=4, id2label=names)
    crosshead.convert(tmp_path / "stock", tmp_path / "model", {"knocking": {}}, verify=False)
    labels = classes(COUNT, 4)
    rows = labelled([1.0 if label == 1 else names[label] for label in labels], premise=4, hypothesis=5)  # as pandas
    write_rows(tmp_path / "rows.jsonl", rows)
    report, _ = run_eval("stock model --data rows.jsonl --compare")
    assert AutoTokenizer.from_pretrained(tmp_path / "stock")("w5", "w6")["token_type_ids"] == [0, 0, 0, 1, 1]
    logits = logits_of(tmp_path / "stock", *([row[name] for row in rows] for name in ("premise", "hypothesis")))
    metrics = scores(report)
    assert metrics["accuracy"] == accuracy_score(labels, logits.argmax(1))
    assert metrics["macro_f1"] == pytest.approx(f1_score(labels, logits.argmax(1), average="macro"))
    assert metrics["loss"] == pytest.approx(
        float(torch.nn.functional.cross_entropy(logits, torch.tensor(labels))), rel=1e-5
    )
    assert report["compared"][0]["scores"][0]["verdict"] == "equal"


def test_regression_scores_match_scipy(run_eval, tmp_path):
    scoring_toys.write_classifier(tmp_path / "model", num_labels=1)
    scoring_toys.write_classifier(tmp_path / "other", num_labels=1, seed=1)
    rows = labelled([label / 2 for label in classes(COUNT, 11)], sentence1=4, sentence2=5)
    write_rows(tmp_path / "rows.tsv", rows)
    report, _ = run_eval("model other --data rows.tsv --compare")
    for index, folder in enumerate(("model", "other")):
        sides = [[row[name] for row in rows] for name in ("sentence1", "sentence2")]
        predictions, labels = logits_of(tmp_path / folder, *sides)[:, 0], [row["label"] for row in rows]
        assert scores(report, index)["pearson"] == pytest.approx(pearsonr(predictions, labels)[0], abs=1e-4)
        assert scores(report, index)["spearman"] == pytest.approx(spearmanr(predictions, labels)[0], abs=1e-4)
    for row in report["compared"][0]["scores"]:
        assert row["change"] == pytest.approx(scores(report, 1)[row["metric"]] - scores(report)[row["metric"]])
        assert row["interval"][0] < row["change"] < row["interval"][1]


@pytest.mark.parametrize("padding", [0, pytest.param(None, marks=pytest.mark.slow)])
def test_decoder_classifier_reads_the_last_token(padding, run_eval, tmp_path):
    """The classifier reads the last token, which it finds by the padding token."""
    config = toys.mixed_config("Llama", {"talking": {}}, num_labels=3, pad_token_id=padding)
    model = toys.lopsided(crosshead.CrossheadLlamaForSequenceClassification(config))
    scoring_toys.write_decoder_classifier(model, tmp_path / "model")
    rows = labelled(classes(COUNT, 3), question=6, sentence=7)
    write_rows(tmp_path / "rows.jsonl", rows)
    report, _ = run_eval("model --data rows.jsonl")
    logits = logits_of(tmp_path / "model", *([row[name] for row in rows] for name in ("question", "sentence")))
    labels = torch.tensor([row["label"] for row in rows])
    assert scores(report)["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-4)
    assert report["models"][0]["model_type"] == "crosshead_llama"


def test_t5_classifier_reads_the_eos_token(run_eval, tmp_path):
    """The classifier reads the EOS token, which this tokenizer does not add."""
    config = transformers.T5Config(**toys.stock_model("T5").config.to_diff_dict() | {"num_labels": 3})
    model = transformers.T5ForSequenceClassification(config).eval()
    scoring_toys.write_decoder_classifier(model, tmp_path / "model")
    rows = labelled(classes(COUNT, 3))
    write_rows(tmp_path / "rows.jsonl", rows)
    metrics = scores(run_eval("model --data rows.jsonl")[0])
    tokenizer, losses = AutoTokenizer.from_pretrained(tmp_path / "model"), []
    for row in rows:
        ids = torch.tensor([[*tokenizer(row["sentence"])["input_ids"], config.eos_token_id]])
        losses.append(torch.nn.functional.cross_entropy(model(ids).logits, torch.tensor([row["label"]])).item())
    assert metrics["loss"] == pytest.approx(sum(losses) / COUNT, rel=1e-4)


def test_long_texts_are_truncated_and_counted(run_eval, tmp_path):
    scoring_toys.write_classifier(tmp_path / "model", num_labels=2, max_position_embeddings=8)
    rows = labelled(classes(COUNT, 2))
    write_rows(tmp_path / "rows.tsv", rows)
    report, out = run_eval("model --data rows.tsv")
    cut = sum(len(row["sentence"].split()) > 6 for row in rows)
    assert {row["items_cut"] for row in report["models"][0]["scores"]} == {cut} and 0 < cut < COUNT
    assert f"{cut} of {COUNT}" in out and "their end" in out


def opened(folder):
    return with_tokenizer(open_config(str(folder)))


@pytest.mark.parametrize("backbone", [pytest.param("Bert", marks=pytest.mark.slow), "Albert"])
def test_masked_language_model_scores(backbone, run_eval, tmp_path):
    scoring_toys.write_masked(tmp_path / "model", backbone)
    (tmp_path / "texts" / "more").mkdir(parents=True)
    scoring_toys.write_prose(tmp_path / "texts" / "a.txt", 300)
    scoring_toys.write_prose(tmp_path / "texts" / "more" / "b.txt", 100, seed=4)
    report, _ = run_eval("model --data texts")
    data = windows.MaskedWindows(opened(tmp_path / "model"), tmp_path / "texts", None, 128)
    assert [len(window) for window in data.tokens] == [126, 126, 48, 100]
    model = getattr(transformers, f"{backbone}ForMaskedLM").from_pretrained(tmp_path / "model")
    losses, hits, masked = [], [], 0
    for window, (positions, _), encoded in zip(data.tokens, data.masked_positions, data.encoded, strict=True):
        whole = torch.tensor([1, *window, 2])
        labels = torch.where(torch.tensor(encoded["input_ids"]) == 3, whole, -100)
        assert labels.ne(-100).nonzero()[:, 0].tolist() == positions.tolist()
        assert torch.tensor(encoded["input_ids"])[labels == -100].equal(whole[labels == -100])
        assert len(positions) == round(0.15 * len(window))
        with torch.no_grad():
            output = model.eval()(input_ids=torch.tensor([encoded["input_ids"]]), labels=labels[None])
        losses.append(float(output.loss) * len(positions))
        hits.append(int((output.logits[0].argmax(-1) == labels).sum()))
        masked += len(positions)
    metrics = scores(report)
    assert metrics["loss"] == pytest.approx(sum(losses) / masked, rel=1e-4)
    assert metrics["perplexity"] == pytest.approx(torch.tensor(metrics["loss"]).exp().item(), rel=1e-4)
    assert metrics["accuracy"] == pytest.approx(sum(hits) / masked)
    assert {row["items"] for row in report["models"][0]["scores"]} == {4}


@pytest.mark.parametrize("backbone", ["Bert", "Albert"])
def test_pretraining_model_is_scored_by_its_masked_language_head(backbone, run_eval, tmp_path):
    scoring_toys.write_masked(tmp_path / "two", backbone, task="ForPreTraining")
    scoring_toys.write_prose(tmp_path / "text.txt", 300)
    first, _ = run_eval("two --data text.txt")
    model = getattr(transformers, f"{backbone}ForMaskedLM").from_pretrained(tmp_path / "two")
    model.save_pretrained(tmp_path / "one")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "two" / name, tmp_path / "one" / name)
    second, _ = run_eval("one --data text.txt")
    assert scores(first) == pytest.approx(scores(second))


def test_masked_positions_are_the_same_for_every_model(run_eval, tmp_path):
    """Neither the context of the model nor the version of crosshead changes them."""
    scoring_toys.write_masked(tmp_path / "model")
    scoring_toys.write_masked(tmp_path / "short", "Albert", max_position_embeddings=64)
    scoring_toys.write_prose(tmp_path / "text.txt", 300)
    report, _ = run_eval("model short --data text.txt --compare")
    assert [model["context"] for model in report["models"]] == [64, 64]
    assert {row["items"] for row in report["compared"][0]["scores"]} == {5}
    data = [
        windows.MaskedWindows(opened(tmp_path / name), tmp_path / "text.txt", 3, 64) for name in ("model", "short")
    ]
    assert [data[0].encoded, data[0].tokens] == [data[1].encoded, data[1].tokens]
    assert data[0].masked_positions[0][0].tolist() == PINNED["places"]


PINNED = {"places": [19, 20, 27, 34, 41, 46, 51, 56, 60], "spans": [(40, 41), (46, 53), (59, 60)]}


@pytest.mark.parametrize("ours", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_t5_span_corruption_scores(ours, run_eval, tmp_path):
    mixers = {"encoder": {"mixture": {"active_heads": 3}}}
    model = toys.mixed_model("T5", mixers, vocab_size=100) if ours else None
    scoring_toys.write_t5(tmp_path / "model", model)
    scoring_toys.write_prose(tmp_path / "text.txt", 300)
    report = score_data([str(tmp_path / "model")], tmp_path / "text.txt", batch_size=2)
    data = windows.CorruptedWindows(opened(tmp_path / "model"), tmp_path / "text.txt", None, 1 << 40)
    (window,), (inputs,), (answer,) = data.tokens, data.inputs, data.answers
    assert restored(inputs, answer) == window
    first = scoring_toys.SENTINEL
    sentinels = [token - first for token in answer if token >= first]
    assert sentinels == list(range(15)) == [token - first for token in inputs if token >= first]
    assert len(answer) == 45 + 15 + 1 and answer[-1] == inputs[-1] == 61
    auto = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        logits = auto(input_ids=torch.tensor([inputs]), labels=torch.tensor([answer])).logits[0]
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(answer))  # model.loss adds the balance loss
    assert scores(report)["loss"] == pytest.approx(float(loss), rel=1e-4)
    hits = (logits.argmax(-1) == torch.tensor(answer)).double().mean()
    assert scores(report)["accuracy"] == pytest.approx(float(hits))


def restored(inputs, answer):
    """Return the window: the inputs with each sentinel replaced by its span."""
    first, spans, sentinel = scoring_toys.SENTINEL, {}, None
    for token in answer[:-1]:
        if token >= first:
            sentinel = token
            spans[sentinel] = []
        else:
            spans[sentinel].append(token)
    return [each for token in inputs[:-1] for each in (spans[token] if token >= first else [token])]


@pytest.mark.parametrize("length", [2, 3, 10, 17, 100, 512])
def test_noise_span_lengths_and_bounds(length):
    generator = torch.Generator().manual_seed(0)
    spans = windows.noise_spans(length, generator)
    noise = max(1, round(0.15 * length))
    assert sum(end - begin for begin, end in spans) == noise and len(spans) == max(1, round(noise / 3))
    bounds = [0, *(bound for span in spans for bound in span)]
    assert all(before < after for before, after in pairwise(bounds)) and bounds[-1] == length


def test_noise_spans_of_the_default_seed_are_unchanged():
    assert windows.noise_spans(60, torch.Generator().manual_seed(windows.SEED)) == PINNED["spans"]
