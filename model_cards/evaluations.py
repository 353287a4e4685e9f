"""Extracts the results of one model from the JSON files of `crosshead eval`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crosshead.common.errors import CardError
from crosshead.common.model_location import expand_home, model_label

EVALUATION = "evaluation.json"
"""File in the model folder with the scores on its card, without paths of this machine."""
SHARED = ("suite", "limit", "versions", "confidence")
"""Report keys that are common to all models."""
OPTIONAL = ("data",)
"""Report keys that only an evaluation on the user's own data has."""
OWN = ("fingerprint", "dtype", "device", "context", "parameters", "scores", "average", "task_versions")
"""Keys of one model in a report."""
ROW = {"name", "task", "metric", "filter", "shots", "score", "standard_error", "items", "items_cut"}
"""Required keys of a score."""


def model_results(
    folder: Path, path: Path, report: Mapping[str, Any], fingerprint: str | None = None
) -> dict[str, Any]:
    """The scores in `report`, read from `path`, of the model in `folder`, and its comparison with the first model.

    The model is identified by its fingerprint or, in an older report without fingerprints, by its path.
    """
    models = report.get("models")
    if not isinstance(models, list) or not all(_is_scored(model) for model in models):
        raise CardError(f"{path} is not a file of `crosshead eval`: it has no scores of models")
    matches = [index for index, model in enumerate(models) if _is_model(model, folder, fingerprint)]
    if len(matches) != 1:
        raise CardError(f"{path} {_mismatch(models, folder, len(matches))}")
    index, model = matches[0], models[matches[0]]
    results = {key: report.get(key) for key in SHARED} | {key: report[key] for key in OPTIONAL if key in report}
    results |= {key: model.get(key) for key in OWN}
    comparisons = report.get("compared") or ()  # comparisons of models 1, 2, ... with model 0
    if 0 < index <= len(comparisons):
        first, comparison = models[0], comparisons[index - 1]
        if len(first["scores"]) != len(model["scores"]):
            raise CardError(f"{path} has other scores of {first['model']} than of {folder}: evaluate them again")
        results["compared"] = {
            "with": label(first["model"]),
            "before": first["scores"],
            "scores": comparison["scores"],
        }
    return results


def check_evaluations(folder: Path, path: Path, evaluations: Sequence[Mapping[str, Any]], fingerprint: str) -> None:
    """`CardError` if the fingerprint of saved scores is not that of the model in the folder."""
    if any(evaluation.get("fingerprint") not in (None, fingerprint) for evaluation in evaluations):
        raise CardError(f"{path} has {_outdated(folder)}, and give its file with --eval")


def _is_model(model: Mapping[str, Any], folder: Path, fingerprint: str | None) -> bool:
    if "fingerprint" in model:
        return model["fingerprint"] is not None and model["fingerprint"] == fingerprint
    return _lies_in(model, folder)


def _lies_in(model: Mapping[str, Any], folder: Path) -> bool:
    return expand_home(model["model"]).resolve() == folder.resolve()


def _mismatch(models: Sequence[Mapping[str, Any]], folder: Path, matches: int) -> str:
    """The error message if `matches`, the number of models in the report that match the folder, is not 1."""
    names = [model["model"] for model in models]
    if matches:
        return f"has the scores of {folder} {matches} times: evaluate it once"
    if any(_lies_in(model, folder) for model in models):
        return f"has {_outdated(folder)}"
    return f"has scores of {', '.join(map(label, names)) or 'no model'}, and none of {folder}: evaluate it first"


def _outdated(folder: Path) -> str:
    return f"scores of {folder} that are older than its config.json or weights: run `crosshead eval` again"


def label(name: str) -> str:
    """The short name of a model, also of a folder that no longer exists."""
    path = expand_home(name)
    return path.resolve().name if not path.is_dir() and (path.is_absolute() or name[:1] == ".") else model_label(name)


def _is_scored(model: Any) -> bool:
    if not isinstance(model, dict) or not isinstance(model.get("model"), str):
        return False
    scores = model.get("scores")
    return isinstance(scores, list) and all(isinstance(row, dict) and row.keys() >= ROW for row in scores)
