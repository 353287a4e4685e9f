"""How much of what a conversion costs comes back in a short training that learns from the source: a loss curve.

usage: python -P tests/measure/recovery.py MODEL TEXT FOLDER [--tokens 200000] [--only explicit] [--set KEY=VALUE ...]

MODEL is what `crosshead convert` takes, with the heads of SmolLM2-135M; TEXT is a file, whose last tenth, or less of a
long one, is held out from conversion and training. The model is converted to 2 of 3 component heads (explicit) and to
7 of 9 active heads (mixture), and each is trained by the shipped recipe with the source as its teacher. Losses are the
next token's, on the held-out text, in nats per token: of the source, of the converted model, and along the training. A
step is a hundredth of the tokens, at most the recipe's own, and its learning rate is the recipe's times the root of
how much smaller the step is. The same command goes on where it was interrupted; the figures go to
FOLDER/recovery.json.

Part of what comes back may be the text's own manner, which the source was not trained on. So each has a control: the
source itself, trained without a teacher on the same windows with the same schedule.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

import crosshead
from crosshead.evals.bench.machine import machine
from crosshead.recipes.data.training_data import open_data
from crosshead.recipes.schema.load import load_recipe
from crosshead.recipes.schema.recipe import Recipe
from crosshead.recipes.train import train
from crosshead.recipes.trainer.loss import evaluate
from crosshead.recipes.trainer.metrics import MetricsFile
from crosshead.recipes.trainer.models import load_tokenizer, vocabulary_size

CASES: dict[str, dict[str, Any]] = {
    "explicit": {"key_heads": "2", "value_heads": "2"},
    "mixture": {"active_heads": "75%", "shared": "calibrated"},
}
CONTROL = "-control"
"""Behind a case's name."""
NAMES = sorted([*CASES, *(f"{name}{CONTROL}" for name in CASES)])
HELD_OUT, MOST = 0.1, 200_000
"""Of the text, and characters at most."""
LENGTH, STEPS, EVALUATIONS = 512, 100, 5
SAME = ("source", "tokens", "text", "learning_rate", "tokens_a_step", "dtype")
"""What a case must have in common with its control."""


def prepare(model: str, text: Path, folder: Path, names: list[str]) -> None:
    """The text in its two parts, the source as a stock model, and the conversions, where they are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    content = text.read_text(encoding="utf-8")
    cut = len(content) - min(MOST, int(len(content) * HELD_OUT))
    for name, part in (("training.txt", content[:cut]), ("held_out.txt", content[cut:])):
        if not (folder / name).exists():
            (folder / name).write_text(part, encoding="utf-8")
    if not (folder / "source").exists():
        crosshead.convert(model, folder / "neutral", {"explicit": {}}, dtype="float32", verify=False, overwrite=True)
        crosshead.fold(folder / "neutral", folder / "source", verify=False)
    for name in names:
        if name in CASES and not (folder / name).exists():
            options = {"calibration": folder / "training.txt", "dtype": "float32"}
            crosshead.convert(folder / "source", folder / name, {name: CASES[name]}, verify=False, **options)


def recipe(folder: Path, name: str, tokens: int, changes: list[str]) -> Recipe:
    """The shipped one, with this text and model, and as many steps as make a curve; a control has no teacher."""
    shipped = f"small/smollm2_{name.removesuffix(CONTROL)}"
    found = load_recipe(shipped)
    batch = max(1, min(found.train.batch_tokens, tokens // STEPS) // LENGTH) * LENGTH
    steps = -(-tokens // batch)
    settings = {
        "output": folder / "runs" / name,
        "model.path": trained_model(folder, name),
        "model.config": "null",
        "model.convert": "null",
        "data.sources": json.dumps([{"path": str(folder / "training.txt")}]),
        "data.evaluation": json.dumps([{"path": str(folder / "held_out.txt")}]),
        "data.held_out": 0,
        "data.length": LENGTH,
        "data.cache": folder / "tokens",
        "train.tokens": tokens,
        "train.batch_tokens": batch,
        "train.learning_rate": found.train.learning_rate * (batch / found.train.batch_tokens) ** 0.5,
        "train.micro_batch": next(size for size in (4, 2, 1) if batch // LENGTH % size == 0),
        "train.dtype": "bfloat16" if torch.accelerator.is_available() else "float32",
        "watch.evaluate_every": max(1, steps // EVALUATIONS),
        "checkpoints.every": max(1, steps // EVALUATIONS),
    }
    if name.endswith(CONTROL):
        settings["distillation"] = "null"
    elif found.distillation is not None:  # the same part of the steps as in the recipe
        settings["distillation.teacher"] = folder / "source"
        for phase in ("match_steps", "transfer_steps"):
            part = getattr(found.distillation, phase) / found.steps
            settings[f"distillation.{phase}"] = round(part * steps)
    return load_recipe(shipped, [*(f"{key}={value}" for key, value in settings.items()), *changes])


def trained_model(folder: Path, name: str) -> Path:
    """Where the model lies that a case begins with."""
    return folder / ("source" if name.endswith(CONTROL) else name)


@torch.no_grad()
def loss(asked: Recipe, folder: Path) -> float:
    """Of a model on the held-out text, in float32."""
    data = open_data(asked.data, load_tokenizer(asked), vocabulary_size(asked))
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(device)
    batches: Any = DataLoader(data.evaluation, asked.train.micro_batch)  # type: ignore[arg-type]
    found = torch.cat([evaluate(model, {key: part.to(device) for key, part in batch.items()}) for batch in batches])
    losses, counts = found.double().sum(0).tolist()
    return losses / counts


def recovered(asked: Recipe, source: float, before: float) -> dict[str, Any]:
    """Train to the end, and read the curve."""
    if train(asked, tell).model is None:
        raise SystemExit("stopped: the same command goes on")
    lines = MetricsFile.lines(Path(asked.output))
    curve = [(line["step"] * asked.train.batch_tokens, line["eval_loss"]) for line in lines if "eval_loss" in line]
    tokens, after = curve[-1]
    return {
        "source": source,
        "before": before,
        "after": after,
        "excess_gone": (before - after) / (before - source) if before != source else None,
        "above_source": after / source - 1,
        "regained_per_million": (before - after) / tokens * 1e6,
        "curve": [(0, before), *curve],
        "learning_rate": asked.train.learning_rate,
        "dtype": asked.train.dtype,
        "tokens_a_step": asked.train.batch_tokens,
        "match_steps": asked.distillation.match_steps if asked.distillation else 0,
    }


def beside_controls(report: dict[str, Any]) -> dict[str, Any]:
    """With each case's figures beside those of its control, where that one was trained in the same way."""
    for name in CASES:
        found, control = report.get(name), report.get(f"{name}{CONTROL}")
        if found and control and all(found.get(key) == control.get(key) for key in SAME):
            found["control"] = control["after"]
            found["above_control"] = found["after"] / control["after"] - 1
    return report


def tell(stage: str, done: int, total: int | None, told: str = "") -> None:
    """What there is to say, once a line."""
    if "held-out" in told:
        print(f"{stage} {done} of {total}: {told}", flush=True)


def main() -> None:
    """Convert, measure, train, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=200_000, help="of training, for each")
    parser.add_argument("--only", choices=NAMES, help="one of them")
    parser.add_argument("--set", action="append", default=[], dest="changes", help="another value in the recipe")
    asked = parser.parse_args()
    disable_progress_bar()
    names = [asked.only] if asked.only else NAMES
    prepare(asked.model, asked.text, asked.folder, names)
    result = asked.folder / "recovery.json"
    for name in names:
        wanted = recipe(asked.folder, name, asked.tokens, asked.changes)
        source, before = (loss(wanted, path) for path in (asked.folder / "source", trained_model(asked.folder, name)))
        print(f"{name}: {before:.4f} on held-out text, its source {source:.4f}", flush=True)
        found = recovered(wanted, source, before)
        report = json.loads(result.read_bytes()) if result.exists() else {}  # the other may run beside this one
        report |= {name: found | {"tokens": asked.tokens, "text": asked.text.name, "machine": machine()}}
        result.write_text(json.dumps(beside_controls(report), indent=2), encoding="utf-8")
        print(f"{name}: {told(found, asked.tokens)}", flush=True)


def told(found: dict[str, Any], tokens: int) -> str:
    """A case's end in words."""
    gone = "" if found["excess_gone"] is None else f", {found['excess_gone']:.1%} of the excess gone"
    return f"{found['after']:.4f} after {tokens:,} tokens, {found['above_source']:+.1%} beside the source{gone}"


if __name__ == "__main__":
    main()
