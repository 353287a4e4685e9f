"""Model cards: measured values come from the JSON records, and the card is valid for the Hub."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, constants, metadata_load
from huggingface_hub.repocard_data import model_index_to_eval_results

import crosshead
from broken import run
from card_toys import converted, report, training, write_report
from crosshead.common.errors import CardError
from crosshead.model_cards.sections import TRANSFORMERS
from crosshead.model_cards.tables import NOT_MEASURED
from crosshead_command.card import write_card
from encoder_toys import write_encoder
from gguf_toys import model, write_model
from hub_client import hub_with
from hub_server import COMMIT, Repository, serving
from rules import ROOT
from toy_checkpoints import write_stock

pytestmark = pytest.mark.xdist_group("card")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, warm_process):
    """A converted model folder whose conversion.json holds the verification's measurements."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("crosshead.conversion.verification.reload.subprocess", warm_process)
        return converted(tmp_path_factory.mktemp("card") / "made")


@pytest.fixture
def made(whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(whole, "made"))


@pytest.fixture
def run_cli(capfd, monkeypatch):
    return lambda command: run(capfd, monkeypatch, command)


def section(text, word):
    """Return the body of the one card section whose heading contains `word`."""
    (body,) = re.findall(rf"^## [^\n]*{word}[^\n]*\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return body


def numbers(text, word):
    """Return the numbers in the one table row whose first cell contains `word`."""
    (row,) = (line for line in text.splitlines() if re.match(rf"\| [^|]*{word}", line))
    return re.findall(r"[-+]?[\d,]+(?:\.\d+)?%?", row.split("|", 2)[2])


def test_card_shows_measurements_from_records(made, run_cli):
    (made / "training.json").write_text(json.dumps(training()))
    write_report(Path("eval.json"), "source", "made", compared=True)
    write_stock(Path("source"))
    status, out, err = run_cli("card made --eval eval.json")
    assert (status, err) == (0, "") and "made/README.md" in out
    text = (made / "README.md").read_text()
    measured = json.loads((made / "conversion.json").read_text())["verification"]
    shown = section(text, "Measured")
    assert numbers(shown, "loss(?= \\|)") == [f"{measured['loss_before']:.4f}", f"{measured['loss_after']:.4f}"]
    assert "1,200 steps" in shown and numbers(shown, "loss on held-out") == ["2.6250"]
    assert numbers(shown, "`knocking`") == ["0.0421"]
    plain, strict = (line.split(" | ") for line in shown.splitlines() if line.startswith("| grammar | acc"))
    assert plain[2:6] == ["0", "240", "0.9225 ± 0.0183", "0.9125 ± 0.0183"] and "strict" in strict[1]
    assert plain[6].startswith("+0.0100 [-0.0200, +0.0400] unclear")
    assert strict[3:6] == ["240", "0.2500", "0.2500"]
    assert "3 of 240 items" in shown and f"{NOT_MEASURED}: lost" in shown
    assert "crosshead train recipe.yaml" in text and "path: own.jsonl" in text
    assert numbers(section(text, "Cost"), "KV cache") == ["256", "256", "0.00%"]
    assert "@misc{zhou2025knocking" in text


def test_card_names_the_tested_versions_of_transformers():
    files = [(ROOT / f"constraints-{name}.txt").read_text() for name in ("oldest", "newest")]
    oldest, newest = (re.search(r"^transformers==(\d+\.\d+)", text, re.MULTILINE)[1] for text in files)
    assert f"{oldest} or newer (tested up to {newest})" == TRANSFORMERS


def test_card_metadata_for_the_hub(made):
    (made / "training.json").write_text(json.dumps(training()))
    write_card(made, [write_report(Path("eval.json"), "made", limit=50)])
    head = metadata_load(made / "README.md")
    assert head["library_name"] == "transformers" and head["datasets"] == ["org/text"]
    assert head["tags"] == ["crosshead", "knocking", "arxiv:2510.23052", "custom_code"]
    assert not {"license", "base_model"} & head.keys()
    name, results = model_index_to_eval_results(head["model-index"])
    assert name == "made" and ModelCard.load(made / "README.md").data.to_dict() == head
    scores = {(each.dataset_type, each.metric_type, each.metric_name): each.metric_value for each in results}
    assert scores == {
        ("crosshead_grammar", "acc", "acc"): 0.9125,
        ("crosshead_grammar", "acc", "acc (strict)"): 0.25,
        ("crosshead_prose", "word_perplexity", "word_perplexity"): 111.4,
        ("held-out", "loss", None): 2.625,
    }
    assert results[0].dataset_args == {"num_few_shot": 0, "limit": 50}
    assert (results[0].source_name, results[-1].source_name) == ("lm-evaluation-harness", None)


def test_card_passes_hub_validation(made, monkeypatch):
    write_card(made, [write_report(Path("eval.json"), "made")])
    card = ModelCard.load(made / "README.md")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving({}) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        card.validate()
        card.data.license = ["mit"]
        with pytest.raises(ValueError, match="license"):
            card.validate()
    assert "POST /api/validate-yaml" in hub.requests


def test_card_without_measurements_says_not_measured(tmp_path):
    folder = converted(tmp_path / "bare", verify=False)
    text = write_card(folder).read_text()
    shown = section(text, "Measured")
    assert shown.count(NOT_MEASURED) == 3 and not re.search(r"\d", shown)
    assert "model-index" not in metadata_load(folder / "README.md")
    (folder / "conversion.json").unlink()
    text = write_card(folder).read_text()
    assert "```" not in section(text, "made")
    assert section(text, "Measured").count(NOT_MEASURED) == 2


def test_python_examples_on_card_run(made, capsys):
    examples = re.findall(r"```python\n(.*?)```", write_card(made).read_text(), re.DOTALL)
    assert len(examples) == 2
    exec(compile("\n".join(examples), "README.md", "exec"), names := {})
    trainable = [name for name, parameter in names["model"].named_parameters() if parameter.requires_grad]
    assert any("lora" in name for name in trainable) and any("mixers.knocking" in name for name in trainable)
    assert capsys.readouterr().out


def test_card_of_folded_model_describes_stock_model(made, run_cli):
    crosshead.convert(write_stock(Path("source")), "linear", {"knocking": {"form": "linear"}}, verify=False)
    assert run_cli("fold linear stock --no-verify")[0] == 0
    text = write_card(Path("stock")).read_text()
    assert "crosshead fold linear stock" in text and "@misc" not in text
    assert "trust_remote_code" not in text and "custom_code" not in metadata_load("stock/README.md")["tags"]


def test_edited_card_is_replaced_only_with_overwrite(made, run_cli):
    path = write_card(made)
    before = path.read_text()
    assert run_cli("card made")[0] == 0 and path.read_text() == before
    path.write_text(edited := before.replace("## Limits", "## Limits\n\nMine."))
    status, out, err = run_cli("card made")
    assert (status, out) == (1, "") and err.startswith("crosshead: error: made/README.md")
    assert err.count("\n") == 1 and path.read_text() == edited
    assert run_cli("card made --overwrite")[0] == 0 and path.read_text() == before


def test_licence_and_base_model_of_existing_card_are_kept(made):
    path = write_card(made)
    path.write_text(path.read_text().replace("---\n", "---\nlicense: mit\nbase_model: org/base\n", 1))
    text = write_card(made, overwrite=True).read_text()
    assert metadata_load(path)["license"] == "mit" and "[org/base](https://huggingface.co/org/base)" in text
    assert write_card(made).read_text() == text


def test_list_of_licences_in_existing_card_is_not_kept(made):
    path = write_card(made)
    before = path.read_text()
    path.write_text(before.replace("---\n", "---\nlicense: [mit, apache-2.0]\n", 1))
    assert write_card(made, overwrite=True).read_text() == before


def test_scores_are_stored_with_model_without_local_paths(made):
    path = str(made.resolve())
    write_card(made, [write_report(Path("eval.json"), str(made.parent.resolve() / "source"), path, compared=True)])
    evaluation = (made / "evaluation.json").read_text()
    assert json.loads(evaluation)["evaluations"][0]["compared"]["with"] == "source"
    before = (made / "README.md").read_text()
    assert str(made.resolve().parent) not in evaluation + before
    assert write_card(made).read_text() == before
    write_card(made, [write_report(Path("other.json"), "made")])
    assert "compared" not in json.loads((made / "evaluation.json").read_text())["evaluations"][0]


def test_title_of_training_result_is_the_name_of_the_run(made):
    (made / "training.json").write_text(json.dumps(training("runs/")))
    result = made.rename("model")
    assert write_card(result).read_text().split("\n# ")[1].startswith("run\n")


@pytest.mark.parametrize("file", ["conversion.json", "training.json", "evaluation.json"])
def test_record_with_unknown_content_is_refused(made, run_cli, file):
    (made / file).write_text('{"what": 1}')
    status, out, err = run_cli("card made")
    assert (status, out, err.count("\n")) == (1, "", 1) and f"made/{file}" in err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (report("other", "source"), "other, source"),
        (report("made") | {"models": [{"model": "made"}]}, "eval.json"),
        ([], "eval.json"),
        (None, "eval.json"),
    ],
)
def test_eval_report_of_other_model_or_format_is_refused(made, run_cli, content, words):
    before = sorted(os.listdir(made))
    if content is not None:
        Path("eval.json").write_text(json.dumps(content))
    status, out, err = run_cli("card made --eval eval.json")
    assert (status, out, err.count("\n")) == (1, "", 1) and words in err
    assert sorted(os.listdir(made)) == before


def test_scores_of_same_named_folder_elsewhere_are_refused(made):
    other = Path(shutil.copytree(made, "elsewhere/made"))
    with pytest.raises(CardError, match="elsewhere/made"):
        write_card(other, [write_report(Path("eval.json"), "made")])


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ("card", 2, "Usage"),
        ("card a b", 2, "(b)"),
        ("card made --evil x", 2, "--eval"),
        ("card nowhere", 1, "nowhere"),
        ("card made --source other", 1, "--source other"),
    ],
)
def test_wrong_arguments_are_refused(made, run_cli, command, status, words):
    exit_status, out, err = run_cli(command)
    assert exit_status == status and words in out + err
    assert not (made / "README.md").exists()


def test_failed_card_write_leaves_no_files(made, monkeypatch):
    before = sorted(os.listdir(made))

    def full(self, *arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ValueError, match=r"README\.md.*No space left"):
        write_card(made)
    assert sorted(os.listdir(made)) == before


def test_licence_of_source_folder(made):
    Path("source").mkdir()
    Path("source/README.md").write_text("---\nlicense: other\nlicense_name: own\nlicense_link: LICENSE\n---\n# x\n")
    text = write_card(made, source="source").read_text()
    head = metadata_load(made / "README.md")
    assert (head["license"], head["license_name"], head["license_link"]) == ("other", "own", "LICENSE")
    assert "[own](LICENSE)" in section(text, "Licence")
    assert write_card(made).read_text() == text


def test_licence_of_gguf_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    metadata = {"general.license": "apache-2.0", "general.source.repo_url": "https://huggingface.co/org/base"}
    write_model(Path("toy.gguf"), model("Llama"), "Llama", **metadata)
    crosshead.convert("toy.gguf", "made", {"knocking": {}}, verify=False)
    write_card(Path("made"), source=Path("toy.gguf"))
    head = metadata_load("made/README.md")
    assert (head["base_model"], head["license"]) == ("org/base", "apache-2.0")


def test_hub_source_gives_base_model_and_licence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = write_stock(Path("stock"))
    (source / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    with hub_with(monkeypatch, {"org/base": Repository(files)}, tmp_path / "cache"):
        crosshead.convert("org/base", "made", {"knocking": {}}, verify=False)
        assert write_card(Path("made"), source="org/base@main").read_text() == write_card(Path("made")).read_text()
        text = write_card(Path("made")).read_text()
    head = metadata_load("made/README.md")
    assert (head["base_model"], head["license"]) == ("org/base", "apache-2.0")
    assert "crosshead convert org/base made" in text and f"--revision {COMMIT}" in text


def test_card_of_encoder(tmp_path):
    source = write_encoder(tmp_path / "source", task="ForTokenClassification")
    crosshead.convert(source, tmp_path / "made", {"gating": {}})
    write_card(tmp_path / "made")
    card = ModelCard.load(tmp_path / "made" / "README.md")
    assert card.data.pipeline_tag == "token-classification"
    assert "AutoModelForTokenClassification.from_pretrained" in card.text
    assert '["query", "key", "value"]' in card.text
    assert "lm_eval" not in card.text and "KV cache, bytes" not in card.text
    assert "| cosine of a token's hidden states |  | 1.0000 |" in card.text
