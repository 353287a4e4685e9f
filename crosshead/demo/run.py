"""The demo's steps in their order, for a source of any size."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from crosshead.common.progress import Progress
from crosshead.evals.bench.machine import machine

from .cards import write_cards
from .making import Conversion, Training, calibrate, continue_training, conversions, convert
from .scoring import decode, page, score
from .sources import Start
from .steps import Record, Screen, Step, run_steps
from .table import rows
from .texts import write_texts

PAGE_TEXT = (
    "The key to the old cabinets is on the desk. When the rain stopped, the children ran down to the river, and the "
    "oldest of them, who knew the way, told the others to wait until she had found the boat."
)
NOTE = (
    "Perplexity: the beginnings of the first {items} of Python's own help topics. Grammar: the first {items} pairs of "
    "sentences, one of them right. Differences are on the same items, with 95% intervals. Calibration and training "
    "read later topics only: none of the text that is scored, but text of the same manner, and part of what training "
    "wins is that manner."
)
CARD = "README.md"


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    items: int
    """Of each task of the offline suite."""
    training: Training


# The recipe's 3e-4 belongs to 65,536 tokens a step; to 512, by the root of that, belongs a tenth.
FULL = Size(24, Training(steps=24, batch_tokens=512, length=512, learning_rate=3e-5, match_steps=6, told_every=4))
SMALL = Size(4, Training(steps=8, batch_tokens=256, length=128, learning_rate=1e-3, match_steps=2, told_every=4))


@dataclass(frozen=True)
class Demo:
    """One source, a folder, and what is made there."""

    start: Start
    folder: Path
    size: Size

    def run(self, screen: Screen) -> dict[str, Any]:
        """Every step that is not done yet; returns the record, which the folder holds as `demo.json`."""
        _, left_out = self.plan
        for line in left_out:
            screen.tell(line)
        before = Record(self.folder).content["steps"]
        run_steps(list(self.steps()), self.folder, screen)
        record = Record(self.folder)
        if (
            "machine" not in record.content or record.content["steps"] != before
        ):  # what is there already is not measured
            record.put(machine=machine())
        found = rows(self.told, self.models, self.file("scores"), self.file("decoded"))
        record.put(left_out=left_out, note=NOTE.format(items=self.size.items), models=found)
        return record.content

    @cached_property
    def plan(self) -> tuple[list[Conversion], list[str]]:
        """The conversions, and why others are left out."""
        return conversions(self.start.heads)

    @property
    def learner(self) -> Conversion:
        """What is trained: the smaller cache, where there is one."""
        asked, _ = self.plan
        return asked[min(1, len(asked) - 1)]

    @property
    def trained(self) -> str:
        """What the trained one is called."""
        return f"{self.learner.name}-trained"

    @property
    def told(self) -> dict[str, str]:
        """Each model -> what it is."""
        after = f"the same after {self.size.training.steps} steps of learning from the source"
        return {"source": self.start.label, **{each.name: each.told for each in self.plan[0]}, self.trained: after}

    @property
    def models(self) -> dict[str, str]:
        """Each model -> what other commands call it by."""
        made = {name: str(self.place(name)) for name in self.told if name != "source"}
        return {"source": self.start.name, **made}

    def place(self, name: str) -> Path:
        """Where a model goes."""
        return self.folder / f"{self.start.label}-{name}"

    def file(self, name: str) -> Path:
        """Where a step's figures go."""
        return self.folder / f"{name}.json"

    def steps(self) -> Iterator[Step]:
        """All of them."""
        yield from self._start()
        yield from self._make()
        yield from self._look()

    def _start(self) -> Iterator[Step]:
        start, items, text = self.start, self.size.items, self.folder / "to_learn.txt"
        yield Step("source", start.told, start.results, lambda work, show: start.make(work), {"is": start.identity})
        told = "text to learn from, apart from the text to score on"
        yield Step("text", told, (text,), lambda work, show: write_texts(items, text), {"items": items})

    def _convert(self, asked: Conversion, work: Path, show: Progress) -> None:
        observed = self.folder / "calibration.safetensors"
        convert(self.start.origin, asked, observed, self.place(asked.name), show)

    def _make(self) -> Iterator[Step]:
        asked, origin, text = self.plan[0], self.start.origin, self.folder / "to_learn.txt"
        observed, training = self.folder / "calibration.safetensors", self.size.training
        calibrated = [each for each in asked if each.calibrated]
        mixers = [each.mixer for each in calibrated]
        if calibrated:
            yield Step(
                "calibration",
                "the source runs on that text, watched by those who convert it",
                (observed,),
                lambda work, show: calibrate(origin, text, calibrated, observed, show),
                {"mixers": mixers},
                ("source", "text"),
            )
        for each in asked:
            yield Step(
                each.name,
                f"{each.name}: {each.told}; converted and verified",
                (self.place(each.name),),
                partial(self._convert, each),
                {"mixer": each.mixer},
                ("source", "calibration") if each.calibrated else ("source",),
            )
        yield Step(
            self.trained,
            f"{self.trained}: {training.steps} steps of {training.batch_tokens} tokens, with the source as teacher",
            (self.place(self.trained),),
            lambda work, show: continue_training(
                self.start.name, text, self.place(self.learner.name), training, self.place(self.trained), work, show
            ),
            asdict(training),
            ("source", "text", self.learner.name),
        )

    def _look(self) -> Iterator[Step]:
        names, pair = list(self.models.values()), [self.start.name, str(self.place(self.trained))]
        scores, decoded, shown = self.file("scores"), self.file("decoded"), self.folder / "heads.html"
        everything = ("source", *(each.name for each in self.plan[0]), self.trained)
        items, folders = self.size.items, [Path(name) for name in names[1:]]
        yield Step(
            "scores",
            f"all models on the offline suite, {items} items of each task",
            (scores,),
            lambda work, show: score(names, items, scores, show),
            {"items": items},
            everything,
        )
        yield Step(
            "decoded",
            "a text decoded by the source and by the trained model, and their caches measured",
            (decoded,),
            lambda work, show: decode(pair, decoded, show),
            {},
            ("source", self.trained),
        )
        yield Step(
            "heads",
            "a page with the heads of both side by side",
            (shown, shown.with_suffix(".json")),
            lambda work, show: page(pair, PAGE_TEXT, shown, show),
            {"text": PAGE_TEXT},
            ("source", self.trained),
        )
        yield Step(
            "cards",
            "model cards",
            tuple(folder / CARD for folder in folders),
            lambda work, show: write_cards(folders, scores, self.start.origin),
            {},
            (*everything, "scores"),
        )
