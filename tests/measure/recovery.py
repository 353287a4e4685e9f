"""Measures how much of the loss increase of a conversion a short training recovers, as loss curves.

usage: python -P tests/measure/recovery.py MODEL TEXT FOLDER [--tokens 200000] [--only explicit] [--set KEY=VALUE ...]

MODEL is a source of `crosshead convert`. TEXT is a file; its last tenth, at most 200,000 characters, is held out from
conversion and training. The model is converted in four ways: to 2 of 3 component heads (explicit), to half of the KV
cache (explicit-half), and to 7 and 5 of 9 active heads (mixture, mixture-5), or to the nearest possible fractions.

Each conversion is trained by the recipe shipped for SmolLM2-135M with the source as teacher, and a second time without
the steps that fit attention outputs (-direct). Losses are next-token losses on the held-out text, in nats per token:
of the source, of the converted model, and during training. A step has a hundredth of the tokens, at most as many as in
the recipe. The learning rate is 2e-4, the best for SmolLM2-135M and for most of its conversions with 200,000 tokens.
The same command resumes an interrupted run. Writes the results to FOLDER/recovery.json. Several commands with `--only`
may run at the same time in one folder.

Part of the recovered loss may come from the style of the text, which the source was not trained on. So each recipe has
a control: the source itself, trained without a teacher on the same windows with the same schedule (-control).
"""

import argparse
import json
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

import crosshead
from crosshead.evals.bench.machine import machine
from crosshead.recipes.data.training_data import open_data
from crosshead.recipes.schema.recipe import Recipe, load_recipe
from crosshead.recipes.train import train
from crosshead.recipes.trainer.loading import initial_config, load_tokenizer
from crosshead.recipes.trainer.metrics import MetricsFile
from crosshead.recipes.trainer.objectives import objective_of

HALF = "explicit-half"
CONVERSIONS = {"explicit": 2 / 3, HALF: 1 / 2, "mixture": 7 / 9, "mixture-5": 5 / 9}
"""Name, which begins with the mechanism -> fraction of component heads, of the KV cache or of active heads."""
CONTROL, DIRECT = "-control", "-direct"
"""Suffixes of run names: `mechanism-control` and `conversion-direct`."""
MECHANISMS = sorted({name.partition("-")[0] for name in CONVERSIONS})
NAMES = [
    *(f"{name}{CONTROL}" for name in MECHANISMS),
    *(f"{name}{way}" for name in CONVERSIONS for way in ("", DIRECT)),
]
HELD_OUT, MOST = 0.1, 200_000
"""Fraction of the text that is held out, and maximum number of its characters."""
LENGTH, STEPS, EVALUATIONS, LEARNING_RATE = 512, 100, 10, 2e-4
NEAR = 0.05
"""Maximum difference from the loss of the control, in nats, that counts as recovered (`tokens_until_near`)."""
SAME = ("tokens", "text", "learning_rate", "tokens_a_step", "dtype")
"""Keys whose values must be the same for a run and its control."""


def prepare(model: str, text: Path, folder: Path, names: list[str]) -> None:
    """Write both parts of the text, the source as a stock model, and the conversions, if they do not exist yet."""
    folder.mkdir(parents=True, exist_ok=True)
    content = text.read_text(encoding="utf-8")
    cut = len(content) - min(MOST, int(len(content) * HELD_OUT))
    for name, part in (("training.txt", content[:cut]), ("held_out.txt", content[cut:])):
        if not (folder / name).exists():
            (folder / name).write_text(part, encoding="utf-8")
    if not (folder / "source").exists():
        crosshead.convert(model, folder / "neutral", {"explicit": {}}, dtype="float32", verify=False, overwrite=True)
        crosshead.fold(folder / "neutral", folder / "source", verify=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fixed: dict[str, Any] = {
        "calibration": folder / "training.txt",
        "dtype": "float32",
        "verify": False,
        "device": device,
    }
    for name in {name.removesuffix(DIRECT) for name in names} & {*CONVERSIONS}:
        if not (folder / name).exists():
            mixers, options = conversion(name, **heads(folder))
            crosshead.convert(folder / "source", folder / name, mixers, **options, **fixed)


def heads(folder: Path) -> dict[str, int]:
    """The number of query heads and of key/value heads of the source, as arguments of `conversion`."""
    config = json.loads((folder / "source" / "config.json").read_bytes())
    return {"heads": config["num_attention_heads"], "kv_heads": config["num_key_value_heads"]}


def conversion(name: str, heads: int, kv_heads: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The mixers and options of a conversion, with the head counts nearest to its fraction."""
    part = CONVERSIONS[name]
    if name == HALF:
        return {"explicit": {}}, {"layers": "auto", "budget": part}
    if name.startswith("explicit"):
        count = str(round(part * kv_heads))
        return {"explicit": {"key_heads": count, "value_heads": count}}, {}
    return {"mixture": {"active_heads": str(round(part * heads))}}, {}


def recipe(folder: Path, name: str, tokens: int, changes: list[str]) -> Recipe:
    """The shipped recipe with this text and model and enough steps for a loss curve; a control has no teacher."""
    shipped = f"small/smollm2_{name.partition('-')[0]}"
    original = load_recipe(shipped)
    batch = max(1, min(original.train.batch_tokens, tokens // STEPS) // LENGTH) * LENGTH
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
        "train.learning_rate": LEARNING_RATE,
        "train.micro_batch": next(size for size in (4, 3, 2, 1) if batch // LENGTH % size == 0),
        "train.dtype": "bfloat16" if torch.accelerator.is_available() else "float32",
        "watch.evaluate_every": max(1, steps // EVALUATIONS),
        "checkpoints.every": max(1, steps // 2),
    }
    if name.endswith(CONTROL):
        settings["distillation"] = "null"
    elif original.distillation is not None:
        settings["distillation.teacher"] = folder / "source"
        for phase in ("transfer_steps", "match_steps"):  # the same fraction of the steps as in the recipe
            part = 0 if name.endswith(DIRECT) else getattr(original.distillation, phase) / original.steps
            settings[f"distillation.{phase}"] = round(part * steps)
    return load_recipe(shipped, [*(f"{key}={value}" for key, value in settings.items()), *changes])


def trained_model(folder: Path, name: str) -> Path:
    """The folder of the model that a run trains."""
    return folder / ("source" if name.endswith(CONTROL) else name.removesuffix(DIRECT))


@torch.no_grad()
def loss(recipe: Recipe, folder: Path) -> float:
    """The loss of a model on the held-out text in float32, in nats per token."""
    data = open_data(recipe.data, load_tokenizer(recipe), initial_config(recipe).vocab_size)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(device)
    batches: Any = DataLoader(data.evaluation, recipe.train.micro_batch)  # type: ignore[arg-type]
    inputs = ({key: part.to(device) for key, part in batch.items()} for batch in batches)
    sums = torch.cat([objective_of(recipe).evaluate(model, batch_inputs)["loss"] for batch_inputs in inputs])
    losses, counts = sums.double().sum(0).tolist()
    return losses / counts


def recovered(recipe: Recipe, source: float, before: float) -> dict[str, Any]:
    """Train to the end, and return the results with the loss curve. `source` and `before` are losses."""
    if train(recipe, tell).model is None:
        raise SystemExit("stopped: the same command goes on")
    lines = MetricsFile.lines(Path(recipe.output))
    curve = [(line["step"] * recipe.train.batch_tokens, line["eval_loss"]) for line in lines if "eval_loss" in line]
    tokens, after = curve[-1]
    settings = recipe.distillation
    return {
        "source": source,
        "before": before,
        "after": after,
        "regained_per_million": (before - after) / tokens * 1e6,
        "curve": [(0, before), *curve],
        "learning_rate": recipe.train.learning_rate,
        "dtype": recipe.train.dtype,
        "tokens_a_step": recipe.train.batch_tokens,
        "weight": settings.weight if settings else None,
        "transfer_steps": settings.transfer_steps if settings else 0,
        "match_steps": settings.match_steps if settings else 0,
    }


def beside_controls(report: dict[str, Any]) -> dict[str, Any]:
    """Add the comparison with the control to each run, if the control was trained with the same settings."""
    for name, result in report.items():
        control = report.get(f"{name.partition('-')[0]}{CONTROL}")
        if name.endswith(CONTROL) or not control or any(result.get(key) != control.get(key) for key in SAME):
            continue
        result |= {"control": control["after"], "above_control": result["after"] - control["after"]}
        both = [*zip(result["curve"], control["curve"], strict=True)]
        near = takewhile(lambda pair: pair[0][1] <= pair[1][1] + NEAR, reversed(both))
        result["tokens_until_near"] = min((own[0] for own, _ in near), default=None)
    return report


def tell(stage: str, done: int, total: int | None, message: str = "") -> None:
    """Print progress messages about held-out losses, one per line."""
    if "held-out" in message:
        print(f"{stage} {done} of {total}: {message}", flush=True)


def main() -> None:
    """Convert, measure, train and measure again; write and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=200_000, help="number of training tokens of each run")
    parser.add_argument("--only", choices=NAMES, help="train only this run")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="changes",
        help="change a value of the recipe: KEY=VALUE, repeatable",
    )
    options = parser.parse_args()
    disable_progress_bar()
    names = [options.only] if options.only else NAMES
    prepare(options.model, options.text, options.folder, names)
    for name in names:
        recipe_of_run = recipe(options.folder, name, options.tokens, options.changes)
        source, before = (
            loss(recipe_of_run, path) for path in (options.folder / "source", trained_model(options.folder, name))
        )
        print(f"{name}: {before:.4f} on held-out text, its source {source:.4f}", flush=True)
        result = recovered(recipe_of_run, source, before)
        result |= {"tokens": options.tokens, "text": options.text.name, **heads(options.folder), "machine": machine()}
        write(options.folder, name, result)
        print(f"{name}: {result['after']:.4f} after {options.tokens:,} tokens", flush=True)


def write(folder: Path, name: str, result: dict[str, Any]) -> None:
    """Write the results of a run to its own file, and collect the results of all runs in recovery.json."""
    results = folder / "results"
    results.mkdir(exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")
    files = {name: results / f"{name}.json" for name in NAMES}
    report = {name: json.loads(path.read_bytes()) for name, path in files.items() if path.exists()}
    (folder / "recovery.json").write_text(json.dumps(beside_controls(report), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
