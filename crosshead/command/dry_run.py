"""`crosshead train --dry-run`."""

import json

from crosshead.recipes.estimate.dry_run import dry_run, dry_run_lines
from crosshead.recipes.estimate.memory import ONE_GPU, read_sharding
from crosshead.recipes.schema.recipe import Recipe


def show_dry_run(recipe: Recipe, accelerate: str | None, as_json: bool) -> None:
    """Print the size, FLOPs and memory of the run."""
    report = dry_run(recipe, read_sharding(accelerate) if accelerate is not None else ONE_GPU)
    if as_json:
        print(json.dumps(report, indent=2))
        return
    for line in dry_run_lines(report):
        print(line)
