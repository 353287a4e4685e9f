"""Crosshead checkpoint in, stock checkpoint out, where the algebra allows it."""

import tempfile
from pathlib import Path
from typing import Any

from .created import mixed_shapes
from .exactness import tolerance
from .expert_bias import dropped_biases
from .families import Family, family_of, read_config, stock_shapes
from .fold_layers import fold_layers
from .job import Job, Prepared, Progress, run_job, silent
from .plan import check_source, make_plan
from .sources import Source, open_source
from .verify import verifier

OURS = ("mixers", "expert_bias", "auto_map", "model_type", "architectures")
"""Fields of our configuration that the stock one has not, or has otherwise."""


def fold(
    model: str | Path,
    out: str | Path,
    *,
    revision: str | None = None,
    overwrite: bool = False,
    restart: bool = False,
    verify: bool = True,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Take a crosshead model back to its stock family; returns the report.

    The report is kept beside the folder as `<name>.conversion.json`: in the folder itself is nothing of ours. A run
    goes on from what an unfinished one of the same fold has left, unless `restart` discards it.
    """
    with tempfile.TemporaryDirectory() as scratch:
        origin = open_source(model, revision, scratch=Path(scratch))
        return run_job(_job(origin), Path(out), overwrite, restart, verifier(origin) if verify else None, progress)


def _job(origin: Source) -> Job:
    mixed = read_config(origin.config, "mixed", origin.origin["name"])
    family = family_of(mixed)
    stock = _stock_config(origin.config, family)
    shapes = stock_shapes(stock)
    dropped = check_source(origin.store, mixed_shapes(mixed, shapes), mixed.tie_word_embeddings)
    dropped |= dropped_biases(origin.store, mixed, shapes)
    rewrites = fold_layers(origin.store, mixed, shapes)
    plan = make_plan(origin.store, shapes, dropped, rewrites.layers, None)
    rounded_to = {step.entry.dtype for steps in plan.shards.values() for step in steps if step.fate == "rewritten"}
    allowed = tolerance(stock, {"F32"} | rounded_to)
    computed = bool(rewrites.layers)
    return Job(
        "fold", origin, {}, plan.size, 0, computed, allowed, lambda keep, progress: Prepared(stock, plan, rewrites, {})
    )


def _stock_config(content: dict[str, Any], family: Family) -> Any:
    config = family.stock.from_dict({key: value for key, value in content.items() if key not in OURS})
    config.architectures = [family.architecture]
    return config
