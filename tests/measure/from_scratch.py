"""Trains a toy model with each mechanism from scratch on the same text, and compares held-out losses over seeds.

usage: PYTHONPATH=tests:tests/measure python -P tests/measure/from_scratch.py FOLDER [--text FILE] [--tokens 1000000]

The default text is the prose in the standard library of this CPython; a tenth of its documents is held out. With the
same seed, all models see the same windows in the same order with the same schedule; only `mixers` differs. The same
command resumes an interrupted run. After each training, the results are written to FOLDER/from_scratch.json: final
held-out losses in nats per token, and their differences from the baseline with the same seed.
"""

import argparse
import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from train_small import documents, train_tokenizer
from transformers.utils.logging import disable_progress_bar

from crosshead.evals.bench.machine import machine
from crosshead.recipes.schema.recipe import Recipe
from crosshead.recipes.schema.sections import CheckpointOptions, DataOptions, DataSource, ModelOptions, TrainOptions
from crosshead.recipes.train import train

BASELINE = "baseline"
CASES: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "knocking, mlp": {"knocking": {"form": "mlp"}},
    "knocking, linear": {"knocking": {"form": "linear", "on": ["query", "key", "value"]}},
    "explicit": {"explicit": {}},
    "talking": {"talking": {}},
    "mixture, 75%": {"mixture": {"active_heads": 6, "shared_heads": 2}},
    "mixture, 50%": {"mixture": {"active_heads": 4, "shared_heads": 2}},
    "differential": {"differential": {}},
}
SHAPE: dict[str, Any] = {
    "model_type": "crosshead_llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
LENGTH, SEQUENCES = 256, 8
DOCUMENT = 2000
"""Minimum number of characters of the documents into which a text file is divided."""


def divided(text: str) -> list[str]:
    """Divide a text into documents of whole paragraphs: a single document would leave none to hold out."""
    parts: list[str] = [""]
    for paragraph in text.split("\n\n"):
        if len(parts[-1]) >= DOCUMENT:
            parts.append("")
        parts[-1] += paragraph + "\n\n"
    return parts


def prepare(folder: Path, text: Path | None) -> int:
    """Write text and tokenizer, if they do not exist yet; return the size of the vocabulary."""
    tokenizer = folder / "tokenizer"
    if not tokenizer.exists():
        folder.mkdir(parents=True, exist_ok=True)
        texts = documents() if text is None else divided(text.read_text(encoding="utf-8"))
        lines = "".join(json.dumps({"text": document}) + "\n" for document in texts)
        (folder / "text.jsonl").write_text(lines, encoding="utf-8")
        train_tokenizer(texts).save_pretrained(str(tokenizer))
    return len(json.loads((tokenizer / "tokenizer.json").read_bytes())["model"]["vocab"])


def recipe(folder: Path, name: str, seed: int, tokens: int, vocabulary: int) -> Recipe:
    """The recipe that trains the case `name` with one seed."""
    batch = LENGTH * SEQUENCES
    return Recipe(
        output=str(folder / "runs" / f"{name.replace(', ', '-').rstrip('%')}-{seed}"),
        model=ModelOptions(
            config=SHAPE | {"vocab_size": vocabulary, "mixers": CASES[name]}, tokenizer=str(folder / "tokenizer")
        ),
        data=DataOptions(
            (DataSource(str(folder / "text.jsonl"), "jsonl"),),
            length=LENGTH,
            held_out=0.1,
            cache=str(folder / "tokens"),
        ),
        train=TrainOptions(
            learning_rate=3e-3,
            tokens=tokens,
            batch_tokens=batch,
            micro_batch=SEQUENCES,
            warmup=0.1,
            dtype="float32",
            seed=seed,
        ),
        checkpoints=CheckpointOptions(every=200, keep=1),
    )


def report(
    losses: dict[str, dict[int, float]], cases: dict[str, dict[str, Any]], settings: dict[str, Any]
) -> dict[str, Any]:
    """The results: means and standard deviations over seeds, from case -> seed -> loss."""
    figures = {}
    for name, by_seed in losses.items():
        differences = [loss - losses[BASELINE][seed] for seed, loss in by_seed.items() if seed in losses[BASELINE]]
        figures[name] = {"mixers": cases[name], "losses": by_seed, "mean": mean(by_seed.values())}
        figures[name] |= {"spread": stdev(by_seed.values()) if len(by_seed) > 1 else None}
        figures[name] |= {
            "beside_baseline": mean(differences),
            "spread_beside": stdev(differences) if len(differences) > 1 else None,
        }
    return {"losses": figures, **settings, "machine": machine()}


def lines(results: dict[str, Any]) -> list[str]:
    """The table: mean and standard deviation over seeds of the loss, and of its difference from the baseline."""
    table = [f"{'held-out loss':18}  seeds  {'mean':>7}  {'+-':>6}  {'beside':>7}  {'+-':>6}"]
    for name, figures in results["losses"].items():
        spreads = (figures["spread"], figures["spread_beside"])
        spread, difference_spread = (f"{value:6.4f}" if value is not None else "" for value in spreads)
        numbers = f"{figures['mean']:7.4f}  {spread:>6}  {figures['beside_baseline']:+7.4f}  {difference_spread:>6}"
        table.append(f"{name:18}  {len(figures['losses']):5}  {numbers}".rstrip())
    return table


def main() -> None:
    """Train all models that are not trained yet, seed by seed, and print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="number of training tokens of each model")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    disable_progress_bar()
    vocabulary = prepare(options.folder, options.text)
    text = str(options.text or "this CPython's prose")
    settings = {"shape": SHAPE, "tokens": options.tokens, "text": text, "vocabulary": vocabulary}
    losses: dict[str, dict[int, float]] = {}
    for seed in range(options.seeds):
        for name in CASES:
            outcome = train(recipe(options.folder, name, seed, options.tokens, vocabulary))
            if outcome.model is None:
                raise SystemExit("stopped: the same command goes on")
            losses.setdefault(name, {})[seed] = outcome.metrics["eval_loss"]
            print(f"seed {seed}, {name}: {losses[name][seed]:.4f}", flush=True)
            results = report(losses, CASES, settings)
            (options.folder / "from_scratch.json").write_text(json.dumps(results, indent=2), encoding="utf-8")
    print("\n".join(lines(results)))


if __name__ == "__main__":
    main()
