"""The facts about a model, from the JSON files in its folder and next to it."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from crosshead.common.errors import CardError
from crosshead.common.fingerprint import model_fingerprint
from crosshead.common.model_location import RESULT, TRAINING

from .evaluations import EVALUATION, check_evaluations, model_results

CONFIG, CONVERSION = "config.json", "conversion.json"
Json = Mapping[str, Any]
PARTS = ("encoder", "decoder", "cross")
"""The parts of a T5; each part has its own mechanisms."""


def mechanisms(config: Json) -> Json:
    """All mechanisms of a config; the options of a T5 mechanism are those of the first part that has it."""
    mixers: Json = config.get("mixers") or {}
    if not any(part in mixers for part in PARTS):
        return mixers
    return {name: options for part in reversed(PARTS) for name, options in mixers.get(part, {}).items()}


@dataclass(frozen=True)
class Facts:
    """The facts that a card shows; a field is empty if it was not recorded or measured."""

    name: str
    """The name of the folder."""
    config: Json
    """The content of config.json."""
    conversion: Json = field(default_factory=dict)
    """The record of the conversion, conversion.json."""
    verified: bool = False
    """True if the comparison with the source in this record is known to be of the present weights."""
    training: Json = field(default_factory=dict)
    """The record of the training, training.json."""
    evaluations: Sequence[Json] = ()
    """The results of this model from files of `crosshead eval`."""
    cost: Json = field(default_factory=dict)
    """The output of `crosshead cost --json`."""
    licence: Mapping[str, str] = field(default_factory=dict)
    """The keys `license`, `license_name` and `license_link` of the source's card."""
    base_model: str | None = None
    """Hub id of the source model."""
    files: Sequence[str] = ()
    """The names of the files in the folder."""
    short_run: Json = field(default_factory=dict)
    """A short training run of a recipe: losses on held-out text, number of tokens and learning rate."""
    plan: Json = field(default_factory=dict)
    """For a page of the zoo: name of the recipe, and the commands that convert and train its model."""

    @property
    def mixers(self) -> Json:
        """The mechanisms of the model, name -> options, in order."""
        return mechanisms(self.config)

    @property
    def remote_code(self) -> bool:
        """True if loading the model runs code from its folder."""
        return bool(self.plan) or "auto_map" in self.config


def read_facts(folder: Path, evaluations: Sequence[Path]) -> Facts:
    """Read the records of a model directory and its results in files of `crosshead eval`.

    `CardError` if the scores are those of another model.
    """
    if not (folder / CONFIG).is_file():
        raise CardError(f"{folder} is not a model directory: {CONFIG} is missing")
    config = read_json(folder / CONFIG)
    absolute = Path(os.path.abspath(folder))
    next_to_folder = absolute.with_name(f"{absolute.name}.{CONVERSION}")
    saved = folder / EVALUATION
    scores = []
    if evaluations:
        fingerprint = model_fingerprint(folder)
        scores = [model_results(folder, path, read_json(path), fingerprint) for path in evaluations]
    elif saved.is_file():
        scores = list(_record(saved, "evaluations", list)["evaluations"])
        check_evaluations(folder, saved, scores, model_fingerprint(folder))
    training = _record(folder / TRAINING, "recipe", dict)
    record = folder / CONVERSION if (folder / CONVERSION).is_file() else next_to_folder
    conversion = _record(record, "source", dict)
    return Facts(
        name=_name(absolute, training),
        config=config,
        conversion=conversion,
        training=training,
        verified=_is_verified(folder, record, conversion, bool(training)),
        evaluations=scores,
        files=sorted(path.name for path in folder.iterdir()),
    )


def _is_verified(folder: Path, path: Path, conversion: Json, trained: bool) -> bool:
    """Whether the record in `path` has measurements of the weights in the folder.

    `CardError` if they are of other weights, unless the model was trained: then the conversion was measured.
    """
    verification = conversion.get("verification")
    measured = verification.get("fingerprint") if isinstance(verification, dict) else None
    if measured is None:
        return False
    is_current: bool = measured == model_fingerprint(folder, with_config=False)
    if not is_current and not trained:
        source = conversion["source"].get("name")
        raise CardError(
            f"{path} has measurements of other weights than those of {folder}: run `crosshead verify SOURCE {folder}` "
            f"with its source, {source}, or remove the key `verification` from the file"
        )
    return is_current


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; `CardError` if it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CardError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CardError(f"{path} is not JSON: {' '.join(str(error).split())[:100]}") from error
    if not isinstance(content, dict):
        raise CardError(f"{path} is not a JSON object")
    return content


def _record(path: Path, key: str, kind: type) -> dict[str, Any]:
    """The content of a record, empty if there is no file; `CardError` unless `key` has a value of type `kind`."""
    content = read_json(path) if path.is_file() else {}
    if content and not isinstance(content.get(key), kind):
        raise CardError(f"{path} is not a record of crosshead: {key!r} is missing; rename or remove it")
    return content


def _name(folder: Path, training: Json) -> str:
    """The name of the folder; for the folder `model` of a training run, the name of the run."""
    output = PurePath(str(training.get("recipe", {}).get("output", "")))
    name = output.name if training and folder.name == RESULT and output.name else folder.name
    return re.sub(r"[^\w .+@-]", "_", name)  # the card contains it in commands and code
