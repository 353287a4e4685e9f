"""Defines the demo's steps in their order, and the checks before the first step."""

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import crosshead
from crosshead.common.model_location import expand_home
from crosshead.common.progress import Progress
from crosshead.evals.bench.machine import machine
from crosshead.evals.inspect.inputs import Inputs
from crosshead.evals.inspect.page import write_report
from crosshead.evals.inspect.report import inspect_report
from crosshead_command.card import write_card

from .making import Conversion, Training, continue_training, conversions
from .scoring import decode, in_engines, score
from .sources import Start, own, smollm2, stock_results, tiny
from .steps import RECORD, Record, Screen, Step, run_steps
from .table import rows
from .texts import write_texts

PAGE_TEXT = (
    "The key to the old cabinets is on the desk. When the rain stopped, the children ran down to the river, and the "
    "oldest of them, who knew the way, told the others to wait until she had found the boat."
)
"""Text on which the page heads.html shows the heads."""
NOTE = (
    "Perplexity: the beginnings of the first {items} of Python's help topics. Grammar: the first {items} pairs of "
    "sentences, one of them correct. Differences are on the same items, with 95% intervals. Calibration and training "
    "read other topics of the same help text, so part of the gain from training comes from its style."
)
CARD, SERVED = "README.md", "served"
NORMALISED = "qwen3"
"""Substring of the model types with normalised keys, such as qwen3 and qwen3_moe."""
ENGINES = {"vllm": "vllm", "llama.cpp": "llama_cpp"}
"""Serving engine -> Python module that shows that it is installed."""


# The learning rate follows the recipe by the square-root rule: at 1,536 tokens per step, 1e-4 and 2e-4 recovered most.
FULL = (24, Training(steps=24, batch_tokens=512, length=512, learning_rate=1e-4, transfer_steps=6, log_every=4))
SMALL = (4, Training(steps=8, batch_tokens=256, length=128, learning_rate=1e-3, transfer_steps=2, log_every=4))
"""The `items` and the `training` of a demo, usually and with a tiny model."""


@dataclass(frozen=True)
class Demo:
    """The demo of one source in one folder."""

    start: Start
    folder: Path
    items: int
    """Number of items of each task of the offline suite."""
    training: Training

    def run(self, screen: Screen) -> dict[str, Any]:
        """Run all steps that are not done yet; return the content of `demo.json`."""
        _, left_out = self.plan
        for line in left_out:
            screen.tell(line)
        before = Record(self.folder).content["steps"]
        run_steps(list(self.steps()), self.folder, screen)
        record = Record(self.folder)
        if "machine" not in record.content or record.content["steps"] != before:
            record.put(machine=machine())
        models = rows(self.descriptions, self.models, self.file("scores"), self.file("decoded"))
        note = NOTE.format(items=self.items)
        record.put(left_out=left_out, note=note, models=models, trained=self.models[self.trained])
        return record.content

    @cached_property
    def plan(self) -> tuple[list[Conversion], list[str]]:
        """The conversions to make, and messages about omitted conversions and steps."""
        possible, left_out = conversions(self.start.heads)
        if NORMALISED in self.start.model_type:
            left_out.append(
                f"{SERVED} is left out: keys of Qwen3 are normalised, and need one component in each group"
            )
        return possible, left_out

    @property
    def is_served(self) -> bool:
        """True if the trained model is folded to a stock checkpoint with the same cache."""
        return self.learner.name == "explicit" and NORMALISED not in self.start.model_type

    @property
    def learner(self) -> Conversion:
        """The conversion that is trained: the second one, usually `explicit`, or the only one."""
        possible, _ = self.plan
        return possible[min(1, len(possible) - 1)]

    @property
    def trained(self) -> str:
        """Name of the trained model."""
        return f"{self.learner.name}-trained"

    @property
    def descriptions(self) -> dict[str, str]:
        """Name of a model -> description, the source first."""
        steps, alone = self.training.steps, self.training.transfer_steps
        after = f"the same after {steps} steps, in the first {alone} each attention layer alone"
        served = {SERVED: "the trained model as a stock checkpoint with the same cache"} if self.is_served else {}
        converted = {conversion.name: conversion.message for conversion in self.plan[0]}
        return {"source": self.start.label, **converted, self.trained: after, **served}

    @property
    def models(self) -> dict[str, str]:
        """Name of a model -> folder or Hub id, the source first."""
        made = {name: str(self.place(name)) for name in self.descriptions if name != "source"}
        return {"source": self.start.name, **made}

    def place(self, name: str) -> Path:
        """The folder of a model."""
        return self.folder / f"{self.start.label}-{name}"

    def file(self, name: str) -> Path:
        """The JSON file of a step."""
        return self.folder / f"{name}.json"

    def steps(self) -> Iterator[Step]:
        """All steps in order."""
        yield from self._start()
        yield from self._make()
        if self.is_served:
            yield from self._serve()
        yield from self._look()

    def _start(self) -> Iterator[Step]:
        start, items, text = self.start, self.items, self.folder / "to_learn.txt"
        yield Step(
            "source", start.message, start.results, lambda work, show: start.make(work), {"is": start.fingerprint}
        )
        message = "text for calibration and training, separate from the scored text"
        yield Step("text", message, (text,), lambda work, show: write_texts(items, text), {"items": items})

    def _convert(self, conversion: Conversion, work: Path, show: Progress) -> None:
        options: dict[str, Any] = {"calibration": self.folder / "to_learn.txt"} if conversion.calibrated else {}
        crosshead.convert(self.start.origin, self.place(conversion.name), conversion.mixers, **options, progress=show)

    def _make(self) -> Iterator[Step]:
        text, training = self.folder / "to_learn.txt", self.training
        for conversion in self.plan[0]:
            yield Step(
                conversion.name,
                f"{conversion.name}: {conversion.message}; converted and verified",
                (self.place(conversion.name),),
                partial(self._convert, conversion),
                {"mixer": conversion.mixer},
                needs=("source", "text") if conversion.calibrated else ("source",),
            )
        yield Step(
            self.trained,
            f"{self.trained}: {training.steps} steps of {training.batch_tokens} tokens, with the source as teacher",
            (self.place(self.trained),),
            lambda work, show: continue_training(
                self.start.name, text, self.place(self.learner.name), training, self.place(self.trained), work, show
            ),
            asdict(training),
            needs=("source", "text", self.learner.name),
        )

    def _serve(self) -> Iterator[Step]:
        served, trained = self.place(SERVED), self.place(self.trained)
        yield Step(
            SERVED,
            f"{SERVED}: the trained model folded to a stock checkpoint that keeps the small cache",
            stock_results(served),
            lambda work, show: crosshead.fold(trained, served, keep_cache=True, progress=show),
            needs=(self.trained,),
        )
        if engines := [engine for engine, package in ENGINES.items() if find_spec(package) is not None]:
            report = self.file("engines")
            yield Step(
                "engines",
                f"the source and the folded model in {' and '.join(engines)}",
                (report,),
                lambda work, show: in_engines(self.start.name, served, engines, report, show),
                {"engines": engines},
                needs=("source", SERVED),
            )

    def _look(self) -> Iterator[Step]:
        scores, decoded, page = self.file("scores"), self.file("decoded"), self.folder / "heads.html"
        pair, served = ["source", self.trained], [SERVED] * self.is_served
        folders = [self.place(name) for name in self.models if name not in ("source", SERVED)]

        def paths(names: list[str]) -> list[str]:
            return [self.models[name] for name in names]

        def write_cards(work: Path, show: Progress) -> None:
            for folder in folders:
                write_card(folder, [scores], source=self.start.origin)

        yield Step(
            "scores",
            f"all models on the offline suite, {self.items} items of each task",
            (scores,),
            lambda work, show: score(list(self.models.values()), self.items, scores, show),
            {"items": self.items},
            needs=tuple(self.models),
        )
        yield Step(
            "decoded",
            "greedy text of the source and of the trained model, with the size of their caches",
            (decoded,),
            lambda work, show: decode(paths(pair + served), decoded, show),
            needs=(*pair, *served),
        )
        yield Step(
            "heads",
            "a page with the heads of both side by side",
            (page, page.with_suffix(".json")),
            lambda work, show: write_report(inspect_report(paths(pair), Inputs({"text": PAGE_TEXT}), show), page),
            {"text": PAGE_TEXT},
            needs=tuple(pair),
        )
        yield Step(
            "cards",
            "model cards",
            tuple(folder / CARD for folder in folders),
            write_cards,
            needs=(*self.models, "scores"),
        )


NEEDED = ("accelerate", "datasets", "gguf", "jinja2", "lm_eval")
"""Optional packages that the demo imports."""
FOLDER = "crosshead-demo"
"""Default output folder."""


def open_demo(model: str | None, is_tiny: bool, out: Path | None) -> Demo:
    """Prepare the demo; `ValueError` if a package is missing, or if the folder is unsuitable or has another demo."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ValueError(f"the demo needs {' and '.join(missing)}: pip install 'crosshead[demo]'")
    folder = expand_home(out or (f"{FOLDER}-tiny" if is_tiny else FOLDER))
    _check_folder(folder)
    start = tiny(folder) if is_tiny else smollm2(folder) if model is None else own(model, folder)
    model_there = Record(folder).content.get("model", start.label)
    if model_there != start.label:
        raise ValueError(
            f"{folder} holds a demo of {model_there}, not of {start.label}: choose another folder with --out"
        )
    folder.mkdir(parents=True, exist_ok=True)
    Record(folder).put(model=start.label)
    items, training = SMALL if is_tiny else FULL
    return Demo(start, folder, items, training)


def _check_folder(folder: Path) -> None:
    """`ValueError` for a folder that has other files or cannot be written."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: choose another place with --out")
    if folder.is_dir() and not (folder / RECORD).exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty and has no {RECORD}: choose another folder with --out")
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"{folder} cannot be written: choose another place with --out")
