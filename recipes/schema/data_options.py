"""The `data` section of a recipe."""

from dataclasses import dataclass, fields
from typing import Literal

from crosshead.common.errors import RecipeError

from .text_values import Count, Positive, Share

OF_THE_HUB = ("subset", "split", "revision", "streaming")
UNREAD = {"text": ("column", *OF_THE_HUB), "jsonl": OF_THE_HUB, "parquet": OF_THE_HUB, "hub": ()}
"""Kind of source -> options that say nothing about it."""


@dataclass(frozen=True)
class DataSource:
    """Where documents come from."""

    path: str
    """A file, a folder (all its files of this kind, at any depth) or a pattern such as `books/**/*.md`; of the kind
    "hub" the name of a dataset on the Hub, or a folder with a copy of one."""
    kind: Literal["text", "jsonl", "parquet", "hub"] = "text"
    """text (a file is one document), jsonl (a line is one), parquet (a row is one) or hub."""
    column: str = "text"
    """Which field of a line or row holds the document."""
    weight: Positive = 1.0
    """This source's share of the training windows, beside those of the other sources."""
    max_tokens: Count | None = None
    """Read no further than the document that reaches so many; one that alone has more is an error, for none is cut."""
    subset: str | None = None
    """hub: which of the dataset's configurations."""
    split: str = "train"
    """hub: which of its splits."""
    revision: str | None = None
    """hub: a branch, tag or commit; without it, what is there on the day when it is tokenised."""
    streaming: bool = False
    """hub: tokenise while the dataset is fetched, and keep no copy of its files."""

    def __post_init__(self) -> None:
        """No option that nothing would come of."""
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name in UNREAD[self.kind] and value != option.default:
                kinds = ", ".join(repr(kind) for kind, unread in UNREAD.items() if option.name not in unread)
                raise RecipeError(
                    f"{option.name}={value!r} says nothing about a source of the kind {self.kind!r}: leave it out, or "
                    f"use a kind that has it ({kinds})"
                )


@dataclass(frozen=True)
class DataOptions:
    """The sources, and how windows of tokens are cut from them."""

    sources: tuple[DataSource, ...]
    """What is trained on."""
    length: Count = 2048
    """Tokens in a window."""
    separate_documents: bool = False
    """Positions restart with each document and no attention crosses from one to the next."""
    held_out: Share = 0.0
    """The share of the sources' documents that is kept from training, to evaluate on.

    A document's own content decides, so it stays on its side when others are added or moved, and so do its copies.
    """
    evaluation: tuple[DataSource, ...] = ()
    """More to evaluate on, whole."""
    cache: str = "~/.cache/crosshead/tokens"
    """The folder where sources that were tokenised once are found again."""

    def __post_init__(self) -> None:
        """Something to read, something to predict, and something to train on."""
        if not self.sources:
            raise RecipeError("sources is empty: name at least one")
        if self.length < 2:
            raise RecipeError(f"length={self.length} leaves nothing to predict: use 2 tokens or more")
        if self.held_out == 1:
            raise RecipeError("held_out=1 leaves nothing to train on: use a smaller share")
