"""`crosshead card`: writes the model card."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer


def card(
    model: Annotated[Path, typer.Argument(help="Model directory.")],
    evaluation: Annotated[
        list[Path] | None,
        typer.Option(
            "--eval",
            help="JSON file of `crosshead eval` with this model; its scores are saved in the directory. Repeatable.",
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(help="Source of the model, to read its licence: a directory, a GGUF file or a Hub id."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a card that was edited by hand.")] = False,
) -> None:
    """Write the model card, README.md, from measured results.

    The results come from conversion.json, training.json and config.json in the directory, and from --eval. For
    example:

    crosshead card models/mine --eval eval.json
    """
    typer.echo(f"wrote {write_card(model, evaluation or (), source=source, overwrite=overwrite)}")


def write_card(
    folder: Path, evaluations: Sequence[Path] = (), *, source: str | Path | None = None, overwrite: bool = False
) -> Path:
    """Write `README.md` into a model directory from measured results; return its path.

    `folder` is the output of `convert`, `fold` or `train`. `evaluations` are JSON files of `crosshead eval` with
    scores of this model; the scores are saved in the folder, and read from there if no files are given. `source` is
    the source of the model (a folder, a GGUF file or a Hub id), which names its licence; not needed for a source on
    the Hub. A card that was edited by hand is an error without `overwrite`.

    On any problem, raises a ValueError with a message of one line and writes nothing.
    """
    from dataclasses import replace

    from crosshead.common.atomic_write import write_atomically
    from crosshead.common.errors import one_line
    from crosshead.model_cards.card import card_files
    from crosshead.model_cards.facts import read_facts
    from crosshead_command.card_source import origin_of

    facts = read_facts(folder, evaluations)
    try:
        recorded = (facts.conversion or facts.training).get("source", {})
        facts = replace(facts, cost=_cost(facts), **origin_of(recorded, source))
        contents = card_files(folder, facts, overwrite)
    except (KeyError, TypeError, AttributeError, IndexError) as error:  # a value is missing or has another type
        raise ValueError(
            f"a record of {folder} is incomplete or damaged ({type(error).__name__}: {one_line(error)}): "
            "conversion.json, training.json, evaluation.json or a file of --eval; write it again"
        ) from error
    write_atomically(contents)
    return next(iter(contents))


def _cost(facts: Any) -> dict[str, Any]:
    """The cost report of the model, which also has the cost of the same model without mechanisms."""
    from crosshead.conversion.architectures.families import family_of
    from crosshead.conversion.architectures.saved_config import saved_config
    from crosshead.evals.cost.model import usual_length
    from crosshead.evals.cost.report import cost_report

    if "_class_name" in facts.config:
        from crosshead.evals.cost.dit_config import DiTConfig

        dit = DiTConfig.read(facts.config, facts.name)
        return cost_report(dit, dit.tokens)
    config = saved_config(dict(facts.config), facts.name)
    if not hasattr(config, "mixers"):
        config = family_of(config).crosshead.from_dict({**facts.config, "mixers": {}})
    return cost_report(config, usual_length(config))
