"""`crosshead card`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

LENGTH = 4096
"""Tokens of the text that costs are given for, where the model takes so many."""


def card(
    model: Annotated[Path, typer.Argument(help="The folder of a model.")],
    evaluation: Annotated[
        list[Path] | None,
        typer.Option("--eval", help="What `crosshead eval` wrote of this model; repeatable. Kept in the folder."),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(help="What the model was made from, for its licence: a folder, a GGUF file or a Hub id."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a card that somebody has edited.")] = False,
) -> None:
    """Write the model card, README.md, from measured results.

    Every number comes from the folder's conversion.json, training.json and config.json, and from --eval. For example:

    crosshead card models/mine --eval eval.json
    """
    typer.echo(f"wrote {write_card(model, evaluation or (), source=source, overwrite=overwrite)}")


def write_card(
    folder: Path, evaluations: Sequence[Path] = (), *, source: str | Path | None = None, overwrite: bool = False
) -> Path:
    """Write `README.md` into a model's folder, from what was measured; returns its path.

    `folder`: a model as `convert`, `fold` or `train` leaves it. `evaluations`: JSON files of `crosshead eval` that
    score this very folder; its part of them is kept in the folder, and used again where none are given. `source`:
    where that lies which the model was made from (a folder, a GGUF file or a Hub id), for its licence; not needed
    where it came from the Hub. A card that somebody has edited is an error, unless `overwrite`.

    A ValueError says in one line what is wrong; then nothing was written.
    """
    from dataclasses import replace

    from crosshead.common.atomic_write import write_whole
    from crosshead.model_cards.card import card_files
    from crosshead.model_cards.facts import read_facts
    from crosshead_command.card_source import origin_of

    facts = read_facts(folder, evaluations)
    facts = replace(facts, cost=_cost(facts), **origin_of(facts.conversion, source))
    contents = card_files(folder, facts, overwrite)
    write_whole(contents)
    return next(iter(contents))


def _cost(facts: Any) -> dict[str, Any]:
    """What the model costs, and would without mechanisms."""
    from crosshead.conversion.architectures.families import PREFIX, family_of, read_config
    from crosshead.evals.cost.report import cost_report

    kind = "mixed" if str(facts.config.get("model_type")).startswith(PREFIX) else "stock"
    config = read_config(dict(facts.config), kind, facts.name)
    if kind == "stock":
        config = family_of(config).mixed.from_dict({**facts.config, "mixers": {}})
    return cost_report(config, min(LENGTH, config.max_position_embeddings))
