"""`crosshead eval --data` refuses bad data with one clear line that names the file and the row."""

import shutil

import pytest
import torch

import scoring_toys
import toys
from broken import edit_json, run, snapshot
from image_toys import write_image_model
from scoring_toys import classes, labelled, write_rows
from toy_eval import write_scorable

ROWS = labelled(classes(6, 2))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    scoring_toys.write_classifier(folder / "classifier", num_labels=2)
    scoring_toys.write_classifier(folder / "regression", num_labels=1)
    scoring_toys.write_classifier(folder / "several", num_labels=2, problem_type="multi_label_classification")
    scoring_toys.write_classifier(folder / "broken", num_labels=2)
    edit = folder / "broken"
    model = scoring_toys.transformers.BertForSequenceClassification.from_pretrained(edit)
    torch.nn.init.constant_(model.classifier.bias, torch.nan)
    model.save_pretrained(edit)
    scoring_toys.write_masked(folder / "masked")
    scoring_toys.write_masked(folder / "narrow", max_position_embeddings=2)
    scoring_toys.write_encoder(folder / "unmasked")
    scoring_toys.write_t5(folder / "t5")
    scoring_toys.write_t5(folder / "sentinels")
    scoring_toys.toy_tokenizer().save_pretrained(folder / "sentinels")
    for model in ("masked", "t5"):
        shutil.copytree(folder / model, folder / f"{model}-alone")
        for file in (folder / f"{model}-alone").glob("tokenizer*"):
            file.unlink()
    write_image_model(folder / "vit")
    write_image_model(folder / "twins", id2label={0: "a", 1: "b", 2: "a"})
    write_image_model(folder / "blind")
    (folder / "blind" / "preprocessor_config.json").unlink()
    write_scorable(toys.stock_model("Llama"), folder / "causal")
    scoring_toys.write_masked(folder / "nameless")
    edit_json(folder / "nameless", "config.json", architectures=...)
    return folder


@pytest.fixture
def workdir(models, tmp_path, monkeypatch):
    for model in models.iterdir():
        (tmp_path / model.name).symlink_to(model)
    write_rows(tmp_path / "rows.tsv", ROWS)
    write_rows(tmp_path / "class.jsonl", [*ROWS, ROWS[0] | {"label": 2}])
    write_rows(tmp_path / "hidden.tsv", [row | {"label": -1} for row in ROWS])
    write_rows(tmp_path / "names.jsonl", [row | {"label": "LABEL1"} for row in ROWS])
    write_rows(tmp_path / "texts.jsonl", [*ROWS, {"text": "w50", "label": 1}])
    write_rows(tmp_path / "labels.tsv", [{"sentence": "w50", "answer": 1}])
    write_rows(tmp_path / "blank.tsv", [*ROWS, {"sentence": " ", "label": 1}])
    write_rows(tmp_path / "number.jsonl", [{"sentence": 5, "label": 1}])
    write_rows(tmp_path / "equal.jsonl", [row | {"label": 1.5} for row in ROWS])
    write_rows(tmp_path / "few.jsonl", ROWS[:2])
    write_rows(tmp_path / "words.jsonl", [*ROWS, ROWS[0] | {"label": "nan"}])
    write_rows(tmp_path / "true.jsonl", [*ROWS, ROWS[0] | {"label": True}])
    write_rows(tmp_path / "huge.jsonl", [*ROWS, ROWS[0] | {"label": 10**400}])
    (tmp_path / "short.tsv").write_text("sentence\tlabel\nw50\t1\nw51\n")
    (tmp_path / "json.jsonl").write_text('{"sentence": "w50", "label": 1}\n{"sentence": \n')
    (tmp_path / "twice.tsv").write_text("sentence\tlabel\tlabel\nw50\t1\t0\n")
    (tmp_path / "half.jsonl").write_text('{"sentence": "w50 \\ud800", "label": 1}\n')
    (tmp_path / "list.jsonl").write_text("[1, 2]\n")
    (tmp_path / "head.tsv").write_text("sentence\tlabel\n")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "zero.txt").write_bytes(b"w50\0w51")
    (tmp_path / "one.txt").write_text("w50")
    (tmp_path / "text.txt").write_text("w50 w51 w52 w53 " * 20)
    (tmp_path / "nothing").mkdir()
    for name in ("0", "LABEL_9"):
        scoring_toys.write_class_folders(tmp_path / f"images-{name}", ["LABEL_1", name])
    scoring_toys.write_class_folders(tmp_path / "damaged", ["0"])
    (tmp_path / "damaged" / "0" / "2.png").write_bytes(b"no image")
    scoring_toys.write_class_folders(tmp_path / "ab", ["a", "b"])
    (tmp_path / "done.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


CASES = {
    "classifier --data none.tsv": ["none.tsv"],
    "classifier --data text.txt": ["text.txt", ".tsv"],
    "classifier --data nothing": ["nothing"],
    "classifier --data head.tsv": ["head.tsv", "no rows"],
    "classifier --data class.jsonl": ["class.jsonl, line 7", "2", "0 to 1"],
    "classifier --data hidden.tsv": ["hidden.tsv, line 2", "'-1'"],
    "classifier --data names.jsonl": ["line 1", "'LABEL1'", "'LABEL_1'"],
    "classifier --data texts.jsonl": ["texts.jsonl, line 7", "sentence", "'text'"],
    "classifier --data labels.tsv": ["labels.tsv, line 2", "label", "'answer'"],
    "classifier --data blank.tsv": ["blank.tsv, line 8", "sentence"],
    "classifier --data number.jsonl": ["number.jsonl, line 1", "sentence is 5"],
    "classifier --data short.tsv": ["short.tsv, line 3", "1 columns", "2"],
    "classifier --data json.jsonl": ["json.jsonl, line 2", "JSON"],
    "classifier --data twice.tsv": ["twice.tsv, line 1", "'label'"],
    "classifier --data half.jsonl": ["half.jsonl, line 1", "sentence", "surrogate"],
    "classifier --data list.jsonl": ["list.jsonl, line 1", "object"],
    "classifier --data rows.tsv --limit 0": ["limit=0"],
    "classifier --data rows.tsv --batch-size many": ["batch_size='many'"],
    "classifier --data rows.tsv --compare": ["two models"],
    "classifier --data rows.tsv --out done.json": ["done.json", "--overwrite"],
    "classifier vit --data rows.tsv": ["classifier", "vit", "sequence classification", "image classification"],
    "several --data rows.tsv": ["several", "problem_type"],
    "broken --data rows.tsv": ["broken", "weights"],
    "regression --data words.jsonl": ["words.jsonl, line 7", "'nan'", "num_labels=1"],
    "regression --data true.jsonl": ["true.jsonl, line 7", "'True'", "num_labels=1"],
    "regression --data huge.jsonl": ["huge.jsonl, line 7", "'1000", "num_labels=1"],
    "regression --data equal.jsonl": ["equal.jsonl"],
    "regression --data few.jsonl": ["few.jsonl", "3 rows"],
    "masked --data empty.txt": ["empty.txt", "empty"],
    "masked --data latin.txt": ["latin.txt", "byte 3"],
    "masked --data zero.txt": ["zero.txt", "binary"],
    "masked --data one.txt": ["one.txt", "2 tokens"],
    "masked --data nothing": ["nothing", ".txt"],
    "masked-alone --data text.txt": ["masked-alone", "no tokenizer with a vocabulary"],
    "t5-alone --data text.txt": ["t5-alone", "no tokenizer with a vocabulary"],
    "narrow --data text.txt": ["narrow", "0 tokens"],
    "masked unmasked --data text.txt": ["unmasked", "mask_token"],
    "sentinels --data text.txt": ["sentinels", "<extra_id_0>"],
    "causal --data text.txt": ["causal", "LlamaForCausalLM", "--suite"],
    "nameless --data text.txt": ["nameless", "architectures"],
    "vit --data text.txt": ["text.txt", "subfolder"],
    "vit --data nothing": ["nothing", "no images"],
    "vit --data damaged/0": ["damaged/0/0.png", "subfolder"],
    "vit --data damaged": ["damaged/0/2.png"],
    "vit --data images-LABEL_9": ["images-LABEL_9/LABEL_9", "'LABEL_9'", "LABEL_0"],
    "twins --data ab": ["ab/a", "2 classes 'a'"],
    "blind --data images-0": ["blind", "image processor"],
}


@pytest.mark.parametrize("command", CASES)
def test_refused_data_gives_one_line_error(command, workdir, capfd, monkeypatch):
    before = snapshot(workdir)
    status, out, err = run(capfd, monkeypatch, f"eval {command}")
    assert (status, out) == (1, "") and err.startswith("crosshead: error: ") and err.count("\n") == 1, err
    assert [word for word in CASES[command] if word not in err] == [], err
    assert snapshot(workdir) == before


def test_different_tokenizers_are_not_compared(workdir, capfd, monkeypatch):
    scoring_toys.write_masked(workdir / "other")
    content = (
        (workdir / "other" / "tokenizer.json")
        .read_text()
        .replace('"w50": 50', '"w50": 4')
        .replace('"w4": 4', '"w4": 50')
    )
    (workdir / "other" / "tokenizer.json").write_text(content)
    status, _, err = run(capfd, monkeypatch, "eval masked other --data text.txt --compare")
    assert status == 1 and "masked" in err and "other" in err and "--compare" in err
    assert run(capfd, monkeypatch, "eval masked other --data text.txt")[0] == 0
