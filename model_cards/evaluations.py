"""This model's part of what `crosshead eval` wrote of several."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import CardError

KEPT = "evaluation.json"
"""In the model's folder: the scores on its card, with nothing of the machine that they were measured on."""
SHARED = ("suite", "limit", "versions", "confidence")
OWN = ("fingerprint", "dtype", "device", "context", "parameters", "scores", "average", "task_versions")
ROW = {"name", "task", "metric", "filter", "shots", "score", "standard_error", "items", "items_cut"}


def scored_here(folder: Path, path: Path, report: Mapping[str, Any], fingerprint: str | None = None) -> dict[str, Any]:
    """What the report in a file says of the model in a folder, and how it compares with the first one.

    A report names each model's fingerprint; in an older one, the model is found by its path.
    """
    models = report.get("models")
    if not isinstance(models, list) or not all(_is_scored(model) for model in models):
        raise CardError(f"{path} is not what `crosshead eval` writes: it has no scores of models")
    here = [place for place, model in enumerate(models) if _is_model(model, folder, fingerprint)]
    if len(here) != 1:
        raise CardError(f"{path} {_mismatch(models, folder, len(here))}")
    mine = models[here[0]]
    found = {key: report.get(key) for key in SHARED} | {key: mine.get(key) for key in OWN}
    comparisons = report.get("compared") or ()  # one for each later model, with the first
    if 0 < here[0] <= len(comparisons):
        first, comparison = models[0], comparisons[here[0] - 1]
        found["compared"] = {"with": label(first["model"]), "before": first["scores"], "scores": comparison["scores"]}
    return found


def check_kept(folder: Path, path: Path, evaluations: Sequence[Mapping[str, Any]], fingerprint: str) -> None:
    """`CardError` where the scores kept in a folder are those of a model that it no longer holds."""
    if any(each.get("fingerprint") not in (None, fingerprint) for each in evaluations):
        raise CardError(f"{path} has {_outdated(folder)}, and give what it writes as --eval")


def _is_model(model: Mapping[str, Any], folder: Path, fingerprint: str | None) -> bool:
    if "fingerprint" in model:
        return model["fingerprint"] is not None and model["fingerprint"] == fingerprint
    return _lies_in(model, folder)


def _lies_in(model: Mapping[str, Any], folder: Path) -> bool:
    return Path(model["model"]).expanduser().resolve() == folder.resolve()


def _mismatch(models: Sequence[Mapping[str, Any]], folder: Path, found: int) -> str:
    """Why none of the models, or more than one, is the one in the folder."""
    names = [model["model"] for model in models]
    if found:
        return f"has scores of {folder} {found} times: score it once"
    if any(_lies_in(model, folder) for model in models):
        return f"has {_outdated(folder)}"
    return f"has scores of {', '.join(map(label, names)) or 'no model'}, and none of {folder}: score it first"


def _outdated(folder: Path) -> str:
    return f"scores of {folder} from before its config.json or weights changed: run `crosshead eval` again"


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
