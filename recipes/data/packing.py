"""Windows of tokens, cut one after the other from the documents of a source.

A document that is longer than the rest of its window goes on in the next one. What that loses: nothing at the
beginning of a window is seen together with what came before it, and a window's first token is not predicted; with
separate documents neither is the first token of any document. The tokens after the last whole window are left out.

The library keeps documents apart by their positions alone, and only without an attention mask and with
`use_cache=False`: with a cache, attention would cross from one to the next in silence.
"""

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from .token_cache import TokenStream

NOT_PREDICTED = -100
"""The label that the loss leaves out."""

Sample = dict[str, torch.Tensor]


class Windows(Dataset[Sample]):
    """The windows of one source, in the order of its documents."""

    def __init__(self, stream: TokenStream, length: int, separate_documents: bool) -> None:
        self._stream, self._length, self._separate = stream, length, separate_documents

    def __len__(self) -> int:
        return len(self._stream.tokens) // self._length

    def __getitem__(self, index: int) -> Sample:
        begin = range(len(self))[index] * self._length
        tokens = torch.from_numpy(self._stream.tokens[begin : begin + self._length].astype(np.int64))
        sample = {"input_ids": tokens, "labels": tokens.clone()}
        sample["labels"][0] = NOT_PREDICTED
        if self._separate:
            starts = self._starts(begin)
            sample["labels"][starts] = NOT_PREDICTED
            sizes = np.diff(starts, append=self._length)
            sample["position_ids"] = torch.from_numpy(np.arange(self._length) - np.repeat(starts, sizes))
        return sample

    def _starts(self, begin: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Where documents begin in a window; what goes on from the window before begins at 0."""
        ends = self._stream.ends
        inside = ends[np.searchsorted(ends, begin, "right") : np.searchsorted(ends, begin + self._length)]
        return np.concatenate([[0], inside - begin])
