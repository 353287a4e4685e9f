"""The training and evaluation data of a run, in sampling order."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from torch.utils.data import ConcatDataset, Dataset

from crosshead.common.errors import RecipeError

from ..schema.sections import DataOptions, DataSource
from .packing import Sample, Windows
from .sampling_order import RunOrder
from .source_files import expanded
from .token_cache import TokenCache, open_cache
from .tokenising import HELD_OUT, TRAINING, TokenEncoder

Progress = Callable[[str, int, int | None], None]
"""Told which source is tokenised, how much of it, and, if known, how much there is."""


def silent(source: str, done: int, total: int | None) -> None:
    """Progress for nobody."""


class RunSamples(Dataset[Sample]):
    """The samples of a run, number 0 to the last, whatever epoch they fall in: to be read in order, never shuffled."""

    def __init__(self, sources: Sequence[Windows], weights: Sequence[float], seed: int, count: int) -> None:
        self._sources, self._count = sources, count
        self._order = RunOrder([len(source) for source in sources], weights, seed)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Sample:
        source, window = self._order.sample(range(self._count)[index])
        return self._sources[source][window]


@dataclass(frozen=True)
class TrainingData:
    """Sources that are tokenised and cut into windows."""

    sources: tuple[Windows, ...]
    weights: tuple[float, ...]
    evaluation: Dataset[Sample] | None
    fingerprint: str
    """Equal where the same seed gives the same samples."""

    @property
    def windows(self) -> int:
        """All there are to train on: the samples of an epoch, where there is one source."""
        return sum(len(source) for source in self.sources)

    def samples(self, count: int, seed: int) -> RunSamples:
        """What a run of so many samples sees."""
        return RunSamples(self.sources, self.weights, seed, count)


def open_data(options: DataOptions, tokenizer: Any, vocabulary: int, progress: Progress = silent) -> TrainingData:
    """Tokenise what is not in the cache yet; `vocabulary` is how many tokens the model knows."""
    encoder = TokenEncoder(tokenizer, vocabulary)
    root = Path(expanded(options.cache))

    def cached(source: DataSource, held_out: float) -> TokenCache:
        return open_cache(source, encoder, held_out, root, partial(progress, source.path))

    def windows(cache: TokenCache, part: str) -> Windows:
        return Windows(cache.stream(part), options.length, options.separate_documents)

    caches = [cached(source, options.held_out) for source in options.sources]
    training = [windows(cache, TRAINING) for cache in caches]
    for source, cache, found in zip(options.sources, caches, training, strict=True):
        if not len(found):
            raise RecipeError(
                f"{source.path} has {cache.parts[TRAINING].tokens} tokens to train on, too few for one window of "
                f"length={options.length}: add text, or use a shorter length or hold less out"
            )
    evaluation = [windows(cache, HELD_OUT) for cache in caches]
    evaluation += [windows(cached(source, 0.0), TRAINING) for source in options.evaluation]
    if not sum(map(len, evaluation)) and (options.held_out or options.evaluation):
        raise RecipeError(
            f"held_out={options.held_out} and evaluation give less than one window of length={options.length} to "
            "evaluate on: hold more out, or name more to evaluate on"
        )
    return TrainingData(
        sources=tuple(training),
        weights=tuple(source.weight for source in options.sources),
        evaluation=ConcatDataset(evaluation) if any(map(len, evaluation)) else None,
        fingerprint=_fingerprint(options, caches),
    )


def _fingerprint(options: DataOptions, caches: Sequence[TokenCache]) -> str:
    sources = [
        (source.weight, cache.parts[TRAINING].digest) for source, cache in zip(options.sources, caches, strict=True)
    ]
    content = json.dumps([options.length, options.separate_documents, sources])
    return blake2b(content.encode(), digest_size=16).hexdigest()
