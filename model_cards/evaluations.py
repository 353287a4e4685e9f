"""This model's part of what `crosshead eval` wrote of several."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import CardError

KEPT = "evaluation.json"
"""In the model's folder: the scores on its card, with nothing of the machine that they were measured on."""
SHARED = ("suite", "limit", "versions", "confidence")
OWN = ("dtype", "device", "context", "parameters", "scores", "average", "task_versions")
ROW = {"name", "task", "metric", "filter", "shots", "score", "standard_error", "items", "items_cut"}


def scored_here(folder: Path, path: Path, report: Mapping[str, Any]) -> dict[str, Any]:
    """What the report in a file says of the model in a folder, and how it compares with another."""
    models = report.get("models")
    if not isinstance(models, list) or not all(_is_scored(model) for model in models):
        raise CardError(f"{path} is not what `crosshead eval` writes: it has no scores of models")
    names = [model["model"] for model in models]
    here = next((name for name in names if is_folder(name, folder)), None)
    if here is None:
        raise CardError(f"{path} has scores of {', '.join(map(label, names)) or 'no model'}, and none of {folder}")
    mine = models[names.index(here)]
    found = {key: report.get(key) for key in SHARED} | {key: mine.get(key) for key in OWN}
    comparison = next((each for each in report.get("compared", ()) if each["second"] == here), None)
    if comparison is not None:
        first = models[names.index(comparison["first"])]
        found["compared"] = {"with": label(first["model"]), "before": first["scores"], "scores": comparison["scores"]}
    return found


def is_folder(name: str, folder: Path) -> bool:
    """Whether an evaluation's name for a model means this folder; one that was moved since keeps its own name."""
    path = Path(name).expanduser()
    if path.resolve() == folder.resolve():
        return True
    return not path.exists() and path.name == folder.resolve().name


def label(name: str) -> str:
    """A model's name without where it lies on a machine; a name on the Hub as it is."""
    path = Path(name).expanduser()
    return path.resolve().name if path.is_dir() or path.is_absolute() or name.startswith(".") else name


def kept(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The content of the file that stays in the folder."""
    return {"evaluations": list(evaluations)}


def _is_scored(model: Any) -> bool:
    if not isinstance(model, dict) or not isinstance(model.get("model"), str):
        return False
    scores = model.get("scores")
    return isinstance(scores, list) and all(isinstance(row, dict) and row.keys() >= ROW for row in scores)
