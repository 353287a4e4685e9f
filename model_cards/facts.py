"""What there is to say of a model: the JSON in and beside its folder."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from crosshead.common.fingerprint import model_fingerprint

from .errors import CardError
from .evaluations import KEPT, check_kept, scored_here

CONFIG, CONVERSION, TRAINING = "config.json", "conversion.json", "training.json"
RESULT = "model"
"""How every run calls the folder of its result."""
Json = Mapping[str, Any]


@dataclass(frozen=True)
class Facts:
    """All that a card is made from; what was not measured is empty."""

    name: str
    """Of the model: its folder's."""
    config: Json
    conversion: Json = field(default_factory=dict)
    training: Json = field(default_factory=dict)
    evaluations: Sequence[Json] = ()
    """This model's part of reports of `crosshead eval`."""
    cost: Json = field(default_factory=dict)
    """As `crosshead cost --json` prints it."""
    licence: Mapping[str, str] = field(default_factory=dict)
    """The source's: `license`, `license_name` and `license_link`, as its own card gives them."""
    base_model: str | None = None
    """The source's name on the Hub."""
    files: Sequence[str] = ()
    """The names in the folder."""
    short_run: Json = field(default_factory=dict)
    """Of a recipe, far from its end: losses on held-out text, and on how many tokens they were reached."""
    plan: Json = field(default_factory=dict)
    """For a model that nobody has made yet: the recipe's name, and the commands that would make it."""

    @property
    def mixers(self) -> Json:
        """The mechanisms, in their order."""
        found: Json = self.config.get("mixers") or {}
        return found

    @property
    def remote_code(self) -> bool:
        """Whether loading runs the code in the folder."""
        return bool(self.plan) or "auto_map" in self.config


def read_facts(folder: Path, evaluations: Sequence[Path]) -> Facts:
    """The records in a model directory, and its part of evaluations; `CardError` if one is about another model."""
    if not (folder / CONFIG).is_file():
        raise CardError(f"{folder} is no folder of a model: it has no {CONFIG}")
    config = read_json(folder / CONFIG)
    place = Path(os.path.abspath(folder))
    beside = place.with_name(f"{place.name}.{CONVERSION}")
    kept = folder / KEPT
    scores = []
    if evaluations:
        here = model_fingerprint(folder)
        scores = [scored_here(folder, path, read_json(path), here) for path in evaluations]
    elif kept.is_file():
        scores = list(_record(kept, "evaluations", list)["evaluations"])
        check_kept(folder, kept, scores, model_fingerprint(folder))
    training = _record(folder / TRAINING, "recipe", dict)
    conversion = _record(folder / CONVERSION, "source", dict) or _record(beside, "source", dict)
    return Facts(
        name=_name(place, training),
        config=config,
        conversion=conversion,
        training=training,
        evaluations=scores,
        files=sorted(path.name for path in folder.iterdir()),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; `CardError` where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CardError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CardError(f"{path} is not JSON: {' '.join(str(error).split())[:100]}") from error
    if not isinstance(content, dict):
        raise CardError(f"{path} holds no JSON object")
    return content


def _record(path: Path, key: str, kind: type) -> dict[str, Any]:
    """What was written about the model, where something was: by what it says first, it is told from another file."""
    content = read_json(path) if path.is_file() else {}
    if content and not isinstance(content.get(key), kind):
        raise CardError(f"{path} is no record of ours: it says nothing of {key!r}")
    return content


def _name(place: Path, training: Json) -> str:
    """The folder's; of a run's result, which is called as all are, the run's."""
    output = PurePath(str(training.get("recipe", {}).get("output", "")))
    return output.name if training and place.name == RESULT and output.name else place.name
