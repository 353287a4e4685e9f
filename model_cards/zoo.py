"""Writes the zoo: a page for the model of each shipped recipe, an index, and a JSON file with all entries."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from crosshead.common.atomic_write import write_atomically
from crosshead.common.errors import CardError, EvalError
from crosshead.common.model_location import TRAINING

from .card import card_text
from .evaluations import EVALUATION
from .facts import CONVERSION, Facts, mechanisms, read_json
from .papers import MECHANISMS
from .tables import NOT_MEASURED, change, figure, size, table

ZOO, INDEX, MEASURED = "zoo.json", "README.md", "measured"
Entry = Mapping[str, Any]
"""Recipe, commands, config, cost and results of one model."""
HEADS = ("model", "mechanism", "backbone", "parameters", "new", "KV bytes per token", "measured")
"""Column heads of the table of models."""
ABOUT = """# The zoo

Each row is the model of one recipe in crosshead, sorted by mechanism, backbone and size; `crosshead zoo` prints the
same list. Parameters and KV cache are computed from the config, for the given dtype. The percentage in brackets is the
change from the same model without mechanisms. Results come from files that commands have written. Each page describes
how to make and use the model."""
HOW = """These pages are generated: `crosshead zoo --write model_cards` makes them from the recipes and from measured
results. To add a result, copy `training.json`, `conversion.json` and `evaluation.json` from the trained model's folder
to `measured/RECIPE/` and run the command again. `crosshead card FOLDER --eval FILE` writes `evaluation.json`."""


def read_zoo() -> list[Entry]:
    """The entries that `write_zoo` stored in the shipped zoo.json."""
    entries: list[Entry] = read_json(Path(__file__).with_name(ZOO))["models"]
    return entries


def measurements(zoo: Path, recipe: str) -> dict[str, Any]:
    """Field of `Facts` -> record of a recipe's model, from the folder `measured` of the zoo."""
    folder, records = zoo / MEASURED / recipe, {}
    for field, name in (("training", TRAINING), ("conversion", CONVERSION), ("evaluations", EVALUATION)):
        if (folder / name).is_file():
            records[field] = read_json(folder / name)
    if "evaluations" in records:
        records["evaluations"] = records["evaluations"]["evaluations"]
    if "conversion" in records:
        records["conversion"].pop("tensors", None)
    return records


def earlier_pages(recipes: Iterable[str], target: Path) -> set[str]:
    """Return the names of the files in `target` that an earlier call wrote; refuse other files that have our names."""
    earlier = set[str]()
    if (target / ZOO).is_file():
        earlier = {ZOO, INDEX, *(f"{entry['recipe']}.md" for entry in read_json(target / ZOO)["models"])}
    for name in (*(f"{recipe}.md" for recipe in recipes), INDEX, ZOO):
        if name not in earlier and (target / name).exists():
            raise CardError(f"{target / name} exists, and no earlier zoo has written it: choose another directory")
    return earlier


def write_zoo(entries: Sequence[Entry], target: Path) -> list[Path]:
    """Write all pages and the JSON file, delete pages of recipes that no longer exist, and return the paths.

    Files that were not written by an earlier call are neither deleted nor replaced.
    """
    earlier, pages = earlier_pages((entry["recipe"] for entry in entries), target), zoo_pages(entries)
    try:
        for name in sorted(earlier - pages.keys()):
            if ".." not in Path(name).parts and not Path(name).is_absolute():
                (target / name).unlink(missing_ok=True)
        for folder in sorted({str(Path(name).parent) for name in pages}):
            (target / folder).mkdir(parents=True, exist_ok=True)
        contents = {target / name: text for name, text in pages.items()}
        write_atomically(contents)
    except OSError as error:
        raise CardError(f"{error.filename} cannot be written: {error.strerror}") from error
    except EvalError as error:
        raise CardError(str(error)) from error
    return list(contents)


def zoo_pages(entries: Sequence[Entry]) -> dict[str, str]:
    """File name -> content, for all files of the zoo."""
    pages = {f"{entry['recipe']}.md": card_text(_facts(entry)) for entry in entries}
    pages[INDEX] = "\n\n".join([ABOUT, *_sections(entries), HOW]) + "\n"
    return pages | {ZOO: json.dumps({"models": list(entries)}, indent=1, ensure_ascii=False) + "\n"}


def _facts(entry: Entry) -> Facts:
    measured = dict(entry["measured"])
    data = {"sources": [{"kind": "hub", "path": path} for path in entry["datasets"]]}
    return Facts(
        name=entry["recipe"].split("/")[1],
        config=entry["config"],
        cost=entry["cost"],
        base_model=entry["base_model"],
        plan={key: entry[key] for key in ("recipe", "convert", "train")},
        training={"recipe": {"data": data}} | measured.pop("training", {}),
        **measured,
    )


def _sections(entries: Sequence[Entry]) -> Iterator[str]:
    """A heading and a table for each combination of mechanisms."""
    for names in dict.fromkeys(mechanisms_of(entry) for entry in entries):
        rows = [row(entry) for entry in entries if mechanisms_of(entry) == names]
        titles = [MECHANISMS[name].title for name in names.split("+") if name in MECHANISMS]
        yield f"## {' and '.join(titles) or 'Without a mechanism, as a baseline'}"
        linked = [[f"[{name}]({name}.md)", *rest[1:]] for name, *rest in rows]
        yield table([HEADS[0], *HEADS[2:]], linked)


def mechanisms_of(entry: Entry) -> str:
    """The names of the mechanisms, joined by `+`; `none` for a model without mechanisms."""
    return "+".join(mechanisms(entry["config"])) or "none"


def row(entry: Entry) -> list[str]:
    """The cells of an entry, in the order of `HEADS`."""
    cost, over = entry["cost"]["cost"], entry["cost"]["overhead"]
    cached = f"{cost['kv_bytes_per_token']:,} {entry['cost']['dtype']}" if cost["kv_bytes_per_token"] else "none"
    if "kv_bytes_per_token" in over and mechanisms_of(entry) != "none":
        cached += f" ({change(over['kv_bytes_per_token'])})"
    backbone = entry["base_model"] or str(entry["config"]["model_type"]).removeprefix("crosshead_")
    parameters = [size(cost["parameters"]), f"{cost['new_parameters']:,}"]
    return [entry["recipe"], mechanisms_of(entry), backbone, *parameters, cached, _measured(entry["measured"])]


def _measured(measured: Mapping[str, Any]) -> str:
    """All results as the text of one cell."""
    results = [
        f"{score['name']} {score['metric']} {figure(score['score'])}"
        for evaluation in measured.get("evaluations", ())
        for score in evaluation["scores"]
    ]
    loss = measured.get("training", {}).get("metrics", {}).get("eval_loss")
    if loss is not None:
        results.insert(0, f"held-out loss {figure(loss)}")
    short = measured.get("short_run")
    if short is not None:
        results.append(f"held-out loss {figure(short['after'])} after {short['tokens']:,} tokens")
    return ", ".join(results) or NOT_MEASURED


def zoo_lines(entries: Sequence[Entry]) -> Iterator[str]:
    """The zoo as a table for a terminal."""
    rows = [list(HEADS), *map(row, entries)]
    widths = [max(len(line[column]) for line in rows) for column in range(len(HEADS))]
    for line in rows:
        yield "  ".join(part.ljust(width) for part, width in zip(line, widths, strict=True)).rstrip()
