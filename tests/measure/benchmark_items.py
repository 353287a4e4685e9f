"""Scores a source, its conversions and the trained conversions on local files with items of PIQA and BLiMP.

usage: python -P tests/measure/benchmark_items.py DATA FOLDER --out FILE [--limit N]

FOLDER is the folder of `recovery.py`, with the source, the conversions and the trained conversions. DATA has
`piqa/*.jsonl` (goal, sol1, sol2, label) and one file per paradigm in `blimp/` (sentence_good, sentence_bad), in the
format of their authors. The tasks are defined as in lm-evaluation-harness, but their items are read from these files
instead of the Hub. Each model is compared with the source on the same items.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from recovery import CONVERSIONS

from crosshead.evals.bench.machine import machine
from crosshead.evals.harness.evaluate import evaluate

PIQA, BLIMP = "piqa_items", "blimp_items"
ACCURACY = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
"""The metric of all tasks."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the scores")
    parser.add_argument("--limit", type=int, help="number of items of each task, from the first")
    return parser.parse_args()


def models(folder: Path) -> dict[str, Path]:
    """Name -> folder of the models that exist, the source first."""
    candidates = {"source": folder / "source"}
    for name in CONVERSIONS:
        candidates |= {name: folder / name, f"{name}-trained": folder / "runs" / name / "model"}
    existing = {name: path for name, path in candidates.items() if (path / "config.json").exists()}
    if len(existing) < 2 or "source" not in existing:
        raise SystemExit(f"{folder} has no source and conversion: make measure-recovery writes them")
    return existing


def task(name: str, files: list[Path], **options: Any) -> dict[str, Any]:
    """The configuration of a task of lm-evaluation-harness that reads JSON lines."""
    if not files:
        raise SystemExit(f"{name}: no .jsonl files; DATA needs the folders piqa and blimp")
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"validation": [str(path.resolve()) for path in files]}},
        "output_type": "multiple_choice",
        "validation_split": "validation",
        "num_fewshot": 0,
        "metric_list": [ACCURACY],
        "metadata": {"version": 1.0},
    } | options


def write_tasks(data: Path, folder: Path) -> None:
    """Write the task files. The harness reads YAML, and JSON is valid YAML."""
    question = "Question: {{goal}}\nAnswer:"
    choices = "{{[sol1, sol2]}}"
    piqa = task(PIQA, sorted((data / "piqa").glob("*.jsonl")), doc_to_text=question, doc_to_choice=choices)
    tasks = [piqa | {"doc_to_target": "label"}]
    pair = {"doc_to_text": "", "doc_to_target": 0, "doc_to_choice": "{{[sentence_good, sentence_bad]}}"}
    paradigms = sorted((data / "blimp").glob("*.jsonl"))
    tasks += [task(f"{BLIMP}_{path.stem}", [path], **pair) for path in paradigms]
    mean = [{"metric": "acc", "aggregation": "mean", "weight_by_size": True}]
    group = {"group": BLIMP, "task": [config["task"] for config in tasks[1:]], "aggregate_metric_list": mean}
    for config in (*tasks, group):
        name = config.get("task") if "group" not in config else BLIMP
        (folder / f"{name}.yaml").write_text(json.dumps(config), encoding="utf-8")


def main() -> None:
    options = arguments()
    folders = models(options.folder)
    with tempfile.TemporaryDirectory() as scratch:
        write_tasks(options.data, Path(scratch))
        report = evaluate(
            [str(path) for path in folders.values()],
            tasks=[PIQA, BLIMP],
            include_path=Path(scratch),
            limit=options.limit,
            compared=True,
            progress=lambda message: print(message, file=sys.__stdout__, flush=True),  # evaluate() hides stdout
        )
    results = figures(report, [*folders]) | {
        "limit": options.limit,
        "versions": report["versions"],
        "machine": machine(),
    }
    options.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(results["models"], indent=2))


def figures(report: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Score and standard error per model and task, with the difference from the source and its confidence interval."""
    by_name: dict[str, Any] = {}
    for index, (name, model) in enumerate(zip(names, report["models"], strict=True)):
        scores = {
            row["task"]: {key: row[key] for key in ("score", "standard_error", "items")} for row in model["scores"]
        }
        for row in report["compared"][index - 1]["scores"] if index else ():
            scores[row["task"]] |= {"change": row["change"], "interval": row["interval"]}
        by_name[name] = scores
    return {"models": by_name}


if __name__ == "__main__":
    main()
