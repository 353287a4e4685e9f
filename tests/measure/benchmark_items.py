"""Scores of a source, its conversions, and these after training, on items of PIQA and BLiMP that lie in a folder.

usage: python -P tests/measure/benchmark_items.py DATA FOLDER --out FILE [--limit N]

FOLDER is that of `recovery.py`: the source, the conversions, and those that were trained. DATA has `piqa/*.jsonl`
(goal, sol1, sol2, label) and a file for each paradigm in `blimp/` (sentence_good, sentence_bad), as their authors
publish them. The tasks are those of lm-evaluation-harness, which reads the items from the files instead of the Hub.
Each model is compared with the source item by item.
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


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the scores")
    parser.add_argument("--limit", type=int, help="items of each task, from the first")
    return parser.parse_args()


def models(folder: Path) -> dict[str, Path]:
    """What there is, by name; the source first."""
    places = {"source": folder / "source"}
    for name in CONVERSIONS:
        places |= {name: folder / name, f"{name}-trained": folder / "runs" / name / "model"}
    found = {name: path for name, path in places.items() if (path / "config.json").exists()}
    if len(found) < 2 or "source" not in found:
        raise SystemExit(f"{folder} has no source and conversion: make measure-recovery writes them")
    return found


def task(name: str, files: list[Path], **options: Any) -> dict[str, Any]:
    """A task of the harness that reads JSON lines."""
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
    """The tasks as files, which are JSON and so YAML."""
    question = "Question: {{goal}}\nAnswer:"
    choices = "{{[sol1, sol2]}}"
    piqa = task(PIQA, sorted((data / "piqa").glob("*.jsonl")), doc_to_text=question, doc_to_choice=choices)
    tasks = [piqa | {"doc_to_target": "label"}]
    pair = {"doc_to_text": "", "doc_to_target": 0, "doc_to_choice": "{{[sentence_good, sentence_bad]}}"}
    paradigms = sorted((data / "blimp").glob("*.jsonl"))
    tasks += [task(f"{BLIMP}_{path.stem}", [path], **pair) for path in paradigms]
    mean = [{"metric": "acc", "aggregation": "mean", "weight_by_size": True}]
    group = {"group": BLIMP, "task": [each["task"] for each in tasks[1:]], "aggregate_metric_list": mean}
    for each in (*tasks, group):
        name = each.get("task") if "group" not in each else BLIMP
        (folder / f"{name}.yaml").write_text(json.dumps(each), encoding="utf-8")


def main() -> None:
    given = arguments()
    places = models(given.folder)
    with tempfile.TemporaryDirectory() as scratch:
        write_tasks(given.data, Path(scratch))
        report = evaluate(
            [str(path) for path in places.values()],
            tasks=[PIQA, BLIMP],
            include_path=Path(scratch),
            limit=given.limit,
            compared=True,
            progress=lambda message: print(message, file=sys.__stdout__, flush=True),  # the harness's output is hidden
        )
    found = figures(report, [*places]) | {"limit": given.limit, "versions": report["versions"], "machine": machine()}
    given.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found["models"], indent=2))


def figures(report: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Score and standard error of each model and task, and the difference from the source with its interval."""
    by_name: dict[str, Any] = {}
    for place, (name, model) in enumerate(zip(names, report["models"], strict=True)):
        scores = {
            row["task"]: {key: row[key] for key in ("score", "standard_error", "items")} for row in model["scores"]
        }
        for row in report["compared"][place - 1]["scores"] if place else ():
            scores[row["task"]] |= {"change": row["change"], "interval": row["interval"]}
        by_name[name] = scores
    return {"models": by_name}


if __name__ == "__main__":
    main()
