"""Writes the generated tables of the documents, and the JSON schema of recipes.

usage: PYTHONPATH=tests:tests/measure python -P tests/measure/tables.py

A table replaces the text between two markers. Results come from the files in `evals/results/`; the table of a missing
file is a line with the command that writes it. Costs are computed from the configurations of shipped recipes.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from conversion_tables import (
    conversions_table,
    embedding_table,
    folded_table,
    heads_table,
    images_table,
    latent_limits_table,
    limits_table,
    refused_table,
    streaming_table,
    transnext_table,
)
from result_files import RESULTS, Content, option_text, written_by
from speed_tables import speed_tables
from training_tables import (
    accuracy_table,
    diffusion_table,
    knocking_table,
    objectives_table,
    parameter_table,
    recovery_table,
    scratch_table,
)

from crosshead.evals.cost.report import cost_report
from crosshead.modeling.mechanisms import MECHANISMS
from crosshead.recipes.estimate.dry_run import dry_run
from crosshead.recipes.estimate.memory import read_sharding
from crosshead.recipes.schema.model_config import DECODERS, model_config, model_types
from crosshead.recipes.schema.recipe import json_schema, load_recipe, shipped_recipes
from rules import ROOT

PAGES = ROOT / "modeling" / "docs"
AT_SCALE = ROOT / "recipes" / "accelerate" / "README.md"
SCHEMA = ROOT / "recipes" / "recipe.schema.json"
SPEED = ROOT / "evals" / "SPEED.md"
QUALITY = ROOT / "evals" / "QUALITY.md"
SERVING = ROOT / "conversion" / "serving.md"
LENGTH, DTYPE = 4096, "bfloat16"
AGAIN = "train.checkpoint_activations=true"
"""Change of a recipe: activation checkpointing, which recomputes activations in the backward pass."""
PLANS = (
    ("papers/mea_qwen3_30b_full", "", "fsdp2_8_gpus"),
    ("papers/mea_qwen3_30b_full", "", "fsdp2_many_machines"),
    ("papers/mea_qwen3_30b_full", "", "deepspeed_zero3_8_gpus"),
    ("papers/kha_dense_0.61b", "", "one_gpu"),
    ("papers/kha_dense_0.61b", AGAIN, "one_gpu"),
    ("papers/kha_dense_0.61b", "", "fsdp2_8_gpus"),
)
"""Rows of the memory table: recipe, change of the recipe, and configuration file of accelerate."""
HELD = ("weights", "gradients", "moments", "average")
"""Keys of the memory report that are shown as one sum."""
BLOCK = re.compile(r"(<!-- (?P<name>\w+): written by `make tables` -->\n).*?(<!-- end -->)", re.DOTALL)
"""Matches a generated table with its markers."""
RECOVERED = {
    "SmolLM2-135M": "recovery.json",
    "small qwen2": "recovery_small_qwen2.json",
    "small qwen3": "recovery_small_qwen3.json",
}
"""Model -> file in `evals/results/` with the results of recovery.py."""


def recovered_table() -> str:
    """Table of the recovery by training, for each model that was measured."""
    files = {model: RESULTS / name for model, name in RECOVERED.items()}
    return recovery_table({model: json.loads(path.read_bytes()) for model, path in files.items() if path.is_file()})


def converted_table() -> str:
    """Table of the most important conversions of SmolLM2-135M."""
    heads, recovery = (json.loads((RESULTS / name).read_bytes()) for name in ("heads.json", "recovery.json"))
    return conversions_table(heads, recovery)


def demo_table(report: Content) -> str:
    """Table of the models of `crosshead demo`."""
    lines = ["| model | perplexity | grammar | KV cache, bytes a token (float32) |", "| --- | ---: | ---: | ---: |"]
    for model in report["models"]:
        scores = f"{model['scores']['prose']:,.2f} | {model['scores']['grammar']:.0%}"
        lines.append(f"| {model['name']}: {model['is']} | {scores} | {model['kv_bytes_per_token']:,} |")
    return "\n".join(lines) + "\n"


def cost_table(mechanism: str) -> str:
    """Table of the costs of a mechanism in the models of the small recipes, relative to the stock models."""
    heads = (
        "recipe",
        "options",
        "new parameters",
        "KV cache, bytes a token",
        "FLOPs of a text",
        "FLOPs of a new token",
    )
    lines = [f"| {' | '.join(heads)} |", "| --- | --- | ---: | ---: | ---: | ---: |"]
    for name in shipped_recipes():
        raw = load_recipe(name).model.config or {}
        if name.startswith("small/") and raw.get("model_type") in model_types(DECODERS) and mechanism in raw["mixers"]:
            lines.append(_cost_row(name, mechanism, raw))
    return "\n".join(lines) + "\n"


def _cost_row(name: str, mechanism: str, content: Content) -> str:
    config = model_config(content)
    config.dtype = DTYPE
    report = cost_report(config, LENGTH)
    cost, stock, over = report["cost"], report["stock"], report["overhead"]
    options = ", ".join(f"{key}: {option_text(value)}" for key, value in content["mixers"][mechanism].items())
    new = f"{cost['new_parameters']:,} ({cost['new_parameters'] / stock['parameters']:.3%})"
    cached = f"{cost['kv_bytes_per_token']:,} ({over['kv_bytes_per_token']:+.1%})"
    work = [f"{over[f'{phase}_flops']:+.2%}" for phase in ("prefill", "decode")]
    return f"| `{name}` | {options} | {' | '.join([new, cached, *work])} |"


def memory_table() -> str:
    """Table of the memory per GPU, from `crosshead train --dry-run`."""
    heads = ("recipe", "where", "weights, gradients, moments", "working copies", "activations", "logits", "in all")
    lines = [f"| {' | '.join(heads)} |", "| --- | --- | ---: | ---: | ---: | ---: | ---: |"]
    return "\n".join([*lines, *(memory_row(*plan) for plan in PLANS)]) + "\n"


def memory_row(name: str, change: str, sharding: str) -> str:
    """The row of one recipe, in GiB."""
    report = dry_run(load_recipe(name, [change] if change else []), read_sharding(sharding))
    memory = report["memory_per_gpu"]
    parts = [sum(memory[part] for part in HELD), memory["working_copies"] + memory["gradient_buckets"]]
    parts += [memory[part] for part in ("activations", "logits", "total")]
    recipe = f"`{name}`" + (f", `{change}`" if change else "")
    return f"| {recipe} | `{sharding}` | {' | '.join(f'{part / 2**30:.1f}' for part in parts)} |"


TABLES: Mapping[str, Callable[[], str]] = {
    "demo": written_by(RESULTS / "demo.json", "make demo", demo_table),
    "conversions": converted_table,
    "heads": written_by(RESULTS / "heads.json", "make measure-heads", heads_table),
    "recovery": recovered_table,
    "folded": written_by(RESULTS / "folded_decode.json", "make measure-folded", folded_table),
    "streaming": written_by(RESULTS / "streaming.json", "make measure-streaming", streaming_table),
    "embeddings": written_by(RESULTS / "embeddings.json", "make measure-embeddings", embedding_table),
    "images": written_by(RESULTS / "image_speed.json", "make measure-images", images_table),
    "encoder_limits": limits_table,
    "transnext_limits": transnext_table,
    "diffusion": written_by(RESULTS / "diffusion.json", "make measure-diffusion", diffusion_table),
    "dit_parameters": parameter_table,
    "objectives": written_by(RESULTS / "objectives.json", "make measure-objectives", objectives_table),
    "latent_limits": latent_limits_table,
    "accuracy": written_by(RESULTS / "benchmark_items.json", "make measure-benchmarks", accuracy_table),
    "knocking_rates": written_by(RESULTS / "knocking_rates.json", "make measure-knocking", knocking_table),
    "from_scratch": written_by(RESULTS / "from_scratch.json", "make measure-from-scratch", scratch_table),
    "refused": refused_table,
    "memory": memory_table,
    "speed": speed_tables,
}
"""Name in the marker -> function that returns the table; any other name is a mechanism, see `cost_table`."""


def renewed(text: str) -> str:
    """The text of a document with its tables generated again."""

    def table(block: re.Match[str]) -> str:
        name = block["name"]
        return block[1] + (TABLES[name]() if name in TABLES else cost_table(name)) + block[3]

    return BLOCK.sub(table, text)


def documents() -> list[Path]:
    """The documents with generated tables. The page of `bilinear` has none, because no recipe uses it."""
    pages = (PAGES / f"{name}.md" for name in (*MECHANISMS, "backbones", "diffusion") if name != "bilinear")
    return [ROOT / "README.md", *pages, SPEED, QUALITY, SERVING, AT_SCALE]


def main() -> None:
    """Generate all tables and the JSON schema, and write the files that differ."""
    new = {path: renewed(path.read_text(encoding="utf-8")) for path in documents()}
    for path, text in (new | {SCHEMA: json_schema()}).items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
