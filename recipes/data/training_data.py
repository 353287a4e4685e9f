"""Training and evaluation data of a run: windows of tokens, in sampling order.

The documents of a source are concatenated and cut into windows of equal length, so that a document may continue in the
next window. The first token of a window is not predicted, nor, with `separate_documents`, the first token of any
document. The tokens after the last whole window are dropped.

transformers detects packed documents by their `position_ids`, and only without an attention mask and with
`use_cache=False`: with a cache, tokens would silently attend to other documents.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset

from crosshead.common.errors import RecipeError
from crosshead.common.progress import Progress, silent
from crosshead.modeling.model import IGNORED_LABEL

from ..schema.sections import DataOptions, DataSource
from .sampling_order import SourceOrder, shuffled
from .token_cache import TokenCache, TokenStream, open_cache
from .tokenising import HELD_OUT, TRAINING, TokenEncoder

FEW = 10
"""With fewer documents, errors about held-out data say that documents are not divided."""

Sample = dict[str, torch.Tensor]


class Windows(Dataset[Sample]):
    """The windows (training sequences) of one source, in document order."""

    def __init__(self, stream: TokenStream, length: int, separate_documents: bool) -> None:
        self._stream, self._length, self._separate = stream, length, separate_documents

    def __len__(self) -> int:
        return len(self._stream.tokens) // self._length

    def __getitem__(self, index: int) -> Sample:
        begin = range(len(self))[index] * self._length
        tokens = torch.from_numpy(self._stream.tokens[begin : begin + self._length].astype(np.int64))
        sample = {"input_ids": tokens, "labels": tokens.clone()}
        sample["labels"][0] = IGNORED_LABEL
        if self._separate:
            starts = self._starts(begin)
            sample["labels"][starts] = IGNORED_LABEL
            sizes = np.diff(starts, append=self._length)
            sample["position_ids"] = torch.from_numpy(np.arange(self._length) - np.repeat(starts, sizes))
        return sample

    def _starts(self, begin: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the offsets in a window at which documents start; a continued document counts as starting at 0."""
        ends = self._stream.ends
        inside = ends[np.searchsorted(ends, begin, "right") : np.searchsorted(ends, begin + self._length)]
        return np.concatenate([[0], inside - begin])


class RunSamples(Dataset[Sample]):
    """All samples of a run, over all its epochs, in sampling order: the data loader must not shuffle them.

    Sources alternate by weight, and each source is shuffled anew in each of its epochs.
    """

    def __init__(self, sources: Sequence[Any], weights: Sequence[float], seed: int, count: int) -> None:
        self._sources, self._order, self._seed, self._count = sources, SourceOrder(weights), seed, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Sample:
        number, draw = self._order.source(range(self._count)[index])
        source = self._sources[number]
        epoch, position = divmod(draw, len(source))
        return source[shuffled(f"{self._seed} {number} {epoch}", len(source), position)]


Draws = np.random.Generator
"""Random generator of one sample."""
Prepare = Callable[[Sample, Draws], Sample]
"""Function that turns a sample into another one with the random generator of the sample."""


class Prepared(Dataset[Sample]):
    """Samples with a random transformation, whose generator for sample n is seeded by a key and n alone."""

    def __init__(self, samples: Any, prepare: Prepare, key: str) -> None:
        self._samples, self._prepare, self._key = samples, prepare, key

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        digest = blake2b(f"{self._key} {index}".encode(), digest_size=16).digest()
        return self._prepare(self._samples[index], np.random.default_rng(int.from_bytes(digest, "big")))


@dataclass(frozen=True)
class TrainingData:
    """Training and evaluation samples of all sources: windows of tokens, or images."""

    sources: tuple[Any, ...]
    weights: tuple[float, ...]
    evaluation: Dataset[Sample] | None
    fingerprint: str
    """Digest of the training data: with an equal fingerprint, the same seed gives the same samples."""
    prepare: Prepare | None = None
    """Random transformation of each training sample, such as augmentation or masking."""

    def samples(self, count: int, seed: int) -> Dataset[Sample]:
        """Return the first `count` training samples of a run with this seed."""
        samples = RunSamples(self.sources, self.weights, seed, count)
        return samples if self.prepare is None else Prepared(samples, self.prepare, f"training {seed}")

    def prepared(self, prepare: Prepare, evaluation: Prepare) -> "TrainingData":
        """Return the same data with random transformations; that of evaluation is the same for all seeds."""
        samples = None if self.evaluation is None else Prepared(self.evaluation, evaluation, "evaluation")
        return replace(self, prepare=prepare, evaluation=samples)


def open_data(options: DataOptions, tokenizer: Any, vocabulary: int, progress: Progress = silent) -> TrainingData:
    """Open the text sources, and tokenise those that are not cached; `vocabulary` is the model's vocabulary size."""
    encoder = TokenEncoder(tokenizer, vocabulary)
    root = Path(options.cache)

    def cached(source: DataSource, held_out: float) -> TokenCache:
        return open_cache(source, encoder, held_out, root, progress)

    def windows(cache: TokenCache, part: str) -> Windows:
        return Windows(cache.stream(part), options.length, options.separate_documents)

    caches = [cached(source, options.held_out) for source in options.sources]
    count = sum(part.documents for cache in caches for part in cache.parts.values())
    few = f"; documents are never divided, and the sources have {count}" if options.held_out and count < FEW else ""
    training = [windows(cache, TRAINING) for cache in caches]
    for source, cache, source_windows in zip(options.sources, caches, training, strict=True):
        if not len(source_windows):
            raise RecipeError(
                f"{source.path} has {cache.parts[TRAINING].tokens} tokens to train on, too few for one window of "
                f"length={options.length}: add text, or use a shorter length or hold less out{few}"
            )
    evaluation = [windows(cache, HELD_OUT) for cache in caches]
    evaluation += [windows(cached(source, 0.0), TRAINING) for source in options.evaluation]
    if not sum(map(len, evaluation)) and (options.held_out or options.evaluation):
        raise RecipeError(
            f"held_out={options.held_out} and evaluation give less than one window of length={options.length} to "
            f"evaluate on: hold more out, or name more to evaluate on{few}"
        )
    weights = tuple(source.weight for source in options.sources)
    digests = [(weight, cache.parts[TRAINING].digest) for weight, cache in zip(weights, caches, strict=True)]
    content = json.dumps([options.length, options.separate_documents, digests])
    return TrainingData(
        sources=tuple(training),
        weights=weights,
        evaluation=ConcatDataset(evaluation) if any(map(len, evaluation)) else None,
        fingerprint=blake2b(content.encode(), digest_size=16).hexdigest(),
    )
