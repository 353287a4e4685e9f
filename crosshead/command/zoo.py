"""`crosshead zoo`: lists the models of the shipped recipes, and writes their pages."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

DTYPE = "bfloat16"
"""Dtype of the KV cache in the cost reports, the same for all models; a DiT has no KV cache."""
SHORT_RUNS = Path("evals", "results", "recovery.json")
"""File with the results of `make measure-recovery` per mechanism, relative to the parent directory of the zoo."""
SHORT_MODEL = "SmolLM2-135M-Instruct, from a GGUF file of type Q4_1"
"""Source model of these results."""
SHORT = ("source", "before", "after", "tokens", "tokens_a_step", "learning_rate")
"""Keys of a result that a page shows."""
LOCAL = ("models/", "runs/")
"""Local directories in the shipped recipes; any other source is a Hub id."""


def zoo(
    as_json: Annotated[bool, typer.Option("--json", help="Print all entries as JSON.")] = False,
    write: Annotated[
        Path | None, typer.Option(help="Write the pages of the shipped recipes to this directory, and stop.")
    ] = None,
) -> None:
    """List the models of the shipped recipes.

    Shows mechanism, backbone, size, cost and results. For example:

    crosshead zoo --json
    """
    from crosshead.model_cards.zoo import earlier_pages, read_zoo, write_zoo, zoo_lines
    from crosshead.recipes.schema.recipe import shipped_recipes

    if write is not None:
        if not write.is_dir():
            raise ValueError(f"{write} is not a directory: create it first")
        earlier_pages(shipped_recipes(), write)  # refuses foreign files before the costs of all models are computed
        for path in write_zoo(entries(write), write):
            typer.echo(f"wrote {path}")
        return
    models = read_zoo()
    typer.echo(json.dumps(models, indent=2) if as_json else "\n".join(zoo_lines(models)))


def entries(folder: Path) -> list[dict[str, Any]]:
    """The zoo entries of all shipped recipes, sorted by mechanism, backbone and size; `folder` contains the zoo."""
    from crosshead.recipes.schema.recipe import load_recipe, shipped_recipes

    recipes = {name: load_recipe(path) for name, path in shipped_recipes().items()}
    # A sweep makes no model; it chooses a hyperparameter for another recipe.
    models = [
        _entry(name, recipe, _commands(recipe, recipes), folder)
        for name, recipe in recipes.items()
        if recipe.sweep is None
    ]
    return sorted(models, key=lambda entry: (*_order(entry), entry["recipe"]))


def _order(entry: dict[str, Any]) -> Iterator[Any]:
    """The sort key of an entry: mechanisms, model type, parameters."""
    from crosshead.model_cards.facts import mechanisms
    from crosshead.modeling.mechanisms import MECHANISMS

    names = list(mechanisms(entry["config"]))
    yield not names, [list(MECHANISMS).index(name) for name in names]
    yield entry["config"]["model_type"]
    yield entry["cost"]["cost"]["parameters"]


def _entry(name: str, recipe: Any, commands: list[str], folder: Path) -> dict[str, Any]:
    from crosshead.evals.cost.model import usual_length
    from crosshead.evals.cost.report import cost_report
    from crosshead.model_cards.zoo import measurements

    config = _counted(recipe)
    return {
        "recipe": name,
        "base_model": _source(commands),
        "config": {**recipe.model.config, **_model(config)},
        "convert": commands,
        "train": f"crosshead train {name}",
        "tokens": recipe.total,
        "datasets": [source.path for source in recipe.data.sources if source.kind == "hub"],
        "cost": cost_report(config, usual_length(config)),
        "measured": measurements(folder, name) | _short_run(folder, name),
    }


def _counted(recipe: Any) -> Any:
    """The configuration of a recipe's model, for the cost report."""
    from crosshead.evals.cost.dit_config import DiTConfig
    from crosshead.recipes.schema.model_config import model_config

    config = model_config(recipe.model.config, recipe.objective)
    if recipe.objective.name == "noise":
        return DiTConfig(asdict(config), config.mixers)
    config.dtype = DTYPE
    config.architectures = [f"{config.class_prefix}{config.auto_classes[recipe.objective.auto_class]}"]
    return config


def _model(config: Any) -> dict[str, Any]:
    """Model type, architectures and mechanisms of a config, as far as it has them; a DiT has no `architectures`."""
    names = ("model_type", "architectures", "mixers")
    return {name: getattr(config, name) for name in names if hasattr(config, name)}


def _short_run(folder: Path, name: str) -> dict[str, Any]:
    """The results of a short run of the recipe, as the field `short_run` of `Facts`; empty if there was none."""
    from crosshead.model_cards.facts import read_json

    path = folder.absolute().parent / SHORT_RUNS
    mechanism = name.removeprefix("small/smollm2_")
    result = read_json(path).get(mechanism) if path.is_file() else None
    return {} if result is None else {"short_run": {"model": SHORT_MODEL} | {key: result[key] for key in SHORT}}


def _commands(recipe: Any, recipes: dict[str, Any]) -> list[str]:
    """The commands to run before a training: those of the recipes whose output it reads, and its own conversion."""
    text = recipe.model.convert or ""
    commands = []
    for name, earlier in recipes.items():
        if f"{earlier.output}/" in f"{recipe.model.path}/ {text}":
            commands += [*_commands(earlier, recipes), f"crosshead train {name}"]
    return commands + [" ".join(line.split()) for line in text.replace("\\\n", " ").strip().splitlines()]


def _source(commands: list[str]) -> str | None:
    """Hub id of the source of the first command, or None if that is local."""
    source = commands[0].split()[2] if commands else None
    return None if source is None or source.startswith(LOCAL) else source
