"""A card shows only scores of the model in its folder; a report on another model is refused."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import crosshead
from card_toys import ROW, converted, report, training
from crosshead.common.errors import CardError
from crosshead.common.fingerprint import model_fingerprint
from crosshead_command.card import write_card
from crosshead_command.push import checked
from toy_checkpoints import write_model
from toys import mixed_model

FIRST, SECOND, THIRD = (ROW["score"] + 0.01 * index for index in range(3))
"""Scores of the models in a report, in the report's order."""


@pytest.fixture
def made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_model(mixed_model("Llama", {"knocking": {}}), Path("made"))


def recorded_scores(made, content):
    """Write the card from a report; return the recorded score and the recorded comparison."""
    Path("eval.json").write_text(json.dumps(content))
    write_card(made, [Path("eval.json")])
    evaluation = json.loads((made / "evaluation.json").read_text())["evaluations"][0]
    return evaluation["scores"][0]["score"], evaluation.get("compared")


def with_fingerprints(content, *fingerprints):
    for model, fingerprint in zip(content["models"], fingerprints, strict=True):
        model["fingerprint"] = fingerprint
    return content


def test_same_named_model_elsewhere_is_not_matched(made):
    """Without fingerprints, a path to another folder does not match, even if that folder no longer exists."""
    assert recorded_scores(made, report("elsewhere/made", "made"))[0] == SECOND
    with pytest.raises(CardError, match="made"):
        recorded_scores(made, report("elsewhere/made"))


def test_fingerprint_matches_a_moved_model(made):
    content = with_fingerprints(report("old/made", "older/made"), "0" * 64, model_fingerprint(made))
    assert recorded_scores(made, content)[0] == SECOND


def test_fingerprint_takes_precedence_over_name(made):
    with pytest.raises(CardError, match="made"):
        recorded_scores(made, with_fingerprints(report("made"), "0" * 64))
    with pytest.raises(CardError, match="made"):
        recorded_scores(made, with_fingerprints(report("org/made"), None))


@pytest.mark.parametrize("marked", [True, False])
def test_model_scored_twice_is_refused(made, marked):
    content = report("made", "made")
    if marked:
        with_fingerprints(content, *[model_fingerprint(made)] * 2)
    with pytest.raises(CardError, match=r"made.* 2"):
        recorded_scores(made, content)
    assert not (made / "README.md").exists()


def test_comparison_belongs_to_the_model_of_the_card(made):
    content = report("source", "other", "made", compared=True)
    content["compared"][1]["scores"][0]["change"] = 0.5
    score, compared = recorded_scores(made, content)
    assert score == THIRD and compared["scores"][0]["change"] == 0.5
    assert compared["before"][0]["score"] == FIRST


def test_comparison_with_a_model_under_home(made):
    """Older reports hold the expanded path among the models, but `~` as typed in the comparison."""
    content = report(str(Path("~/first").expanduser()), "made", compared=True)
    content["compared"][0]["first"] = "~/first"
    assert recorded_scores(made, content)[1]["with"] == "first"


def test_scores_of_one_item_are_shown_without_interval(made):
    content = report("source", "made", compared=True)
    content["compared"][0]["scores"][0]["interval"] = None
    recorded_scores(made, content)
    assert "| +0.0100 unclear |" in (made / "README.md").read_text()


def test_measurements_of_a_changed_conversion_are_refused(tmp_path, monkeypatch):
    """A model that `crosshead train` trained later is no error: its card says when the measurements were made."""
    monkeypatch.chdir(tmp_path)
    made = converted(Path("made"))
    write_card(made)
    assert checked(made)
    shard = made / "model-00001-of-00005.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(shard).items()}, shard)
    for command in (write_card, checked):
        with pytest.raises(
            CardError, match=r"other weights .* `crosshead verify SOURCE made` with its source, source,"
        ):
            command(made)
    (made / "training.json").write_text(json.dumps(training()))
    write_card(made)
    assert "before training, on " in (made / "README.md").read_text()
    crosshead.verify("source", made)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"transformers_version": "5.17.0"}))
    write_card(made)
    assert "before training, on " not in (made / "README.md").read_text()
    (made / "training.json").unlink()
    write_card(made)
    assert checked(made)


def test_stored_scores_of_a_changed_model_are_refused(made):
    recorded_scores(made, with_fingerprints(report("made"), model_fingerprint(made)))
    write_card(made)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"initializer_range": 0.5}))
    for command in (write_card, checked):
        with pytest.raises(CardError, match=r"evaluation\.json"):
            command(made)
    recorded_scores(made, with_fingerprints(report("made"), model_fingerprint(made)))
