"""Toy models with the records that a model card is made from."""

import json
from pathlib import Path
from typing import Any

import crosshead
from toy_checkpoints import write_stock

ROW = {
    "name": "grammar",
    "task": "crosshead_grammar",
    "metric": "acc",
    "filter": "none",
    "shots": 0,
    "score": 0.9125,
    "standard_error": 0.0183,
    "items": 240,
    "items_cut": 3,
    "higher_is_better": True,
}
PROSE = ROW | {"name": "prose", "task": "crosshead_prose", "metric": "word_perplexity", "score": 111.4, "items_cut": 0}
WRITTEN = ROW | {"filter": "strict", "shots": None, "score": 0.25, "standard_error": None, "items_cut": 0}


def report(*models: str, compared: bool = False, **changes: Any) -> dict[str, Any]:
    """Return a report like those of `crosshead eval`; each model scores 0.01 higher than the one before it."""
    evaluated = []
    for index, name in enumerate(models):
        rows = [ROW | {"score": ROW["score"] + 0.01 * index}, PROSE, WRITTEN]
        evaluated.append({"model": name, "parameters": 1, "dtype": "float32", "device": "cpu", "scores": rows})
    content: dict[str, Any] = {"suite": {"name": "offline", "source": "crosshead", "missing": ["lost"]}, "limit": None}
    content |= {"versions": {"lm_eval": "0.4.13"}, "models": evaluated, "confidence": 0.95, "compared": []}
    if compared:
        change = {key: ROW[key] for key in ("name", "metric", "filter")} | {"scale": "difference", "change": 0.01}
        change |= {"interval": [-0.02, 0.04], "verdict": "unclear"}
        content["compared"] = [{"first": models[0], "second": name, "scores": [change]} for name in models[1:]]
    return content | changes


def write_report(path: Path, *models: str, **options: Any) -> Path:
    """Write `report(*models, **options)` to a JSON file; return its path."""
    path.write_text(json.dumps(report(*models, **options)))
    return path


def training(place: str = "") -> dict[str, Any]:
    """Return the training.json of a run, with its paths below `place`."""
    sources = [{"path": "org/text", "kind": "hub", "subset": None}, {"path": f"{place}own.jsonl", "kind": "jsonl"}]
    recipe = {"output": f"{place}run", "model": {"path": f"{place}made"}, "data": {"sources": sources, "length": 64}}
    metrics = {"step": 1200, "loss": 2.5, "eval_loss": 2.625, "drift/knocking": 0.0421}
    return {"recipe": recipe, "processes": 2, "metrics": metrics}


def converted(folder: Path, mixers: dict[str, Any] | None = None, verify: bool = True, **options: Any) -> Path:
    """Convert the toy checkpoint `source` (several shards), a sibling of `folder`, to `folder`; return `folder`."""
    source = folder.parent / "source"
    if not source.exists():
        write_stock(source, shard_size=12_000)
    crosshead.convert(source, folder, mixers or {"knocking": {}}, verify=verify, **options)
    return folder
