"""Documents of a dataset on the Hub."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .column_text import checked_text, missing_column
from .data_options import DataSource
from .errors import RecipeError, one_line
from .source_files import expanded

_QUERY = re.compile(r"\?\S*")
"""The part of an address in which a signature may stand."""
EMPTY = ("BatchSize must be greater than 0", "corresponds to no data", "at least one example", "StopIteration")
"""What datasets says of a split, or a file of it, that has no rows."""


def hub_documents(source: DataSource) -> Iterator[str]:
    """The texts of a dataset in its own order, `RecipeError` where it cannot be loaded or read to its end."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise RecipeError('Hub datasets need the datasets package: pip install "crosshead[train]"') from error
    path = expanded(source.path)
    options = {"split": source.split, "revision": source.revision, "streaming": source.streaming}
    try:
        with _silence():
            rows = load_dataset(path, source.subset, **options)
            if rows.column_names is not None and source.column in rows.column_names:
                rows = rows.select_columns([source.column])  # the others may be images
            for number, row in enumerate(rows, 1):
                yield _text(row, source, number)
    except RecipeError:
        raise
    except Exception as error:  # of the library, of the network, of the file formats
        reason = _QUERY.sub("", one_line(error.__cause__ or error))
        if any(words in reason for words in EMPTY):
            raise RecipeError(
                f"the Hub dataset {source.path} is empty in its split {source.split!r}, or a file of it is: choose "
                "another, or take the empty file out"
            ) from error
        raise RecipeError(f"the Hub dataset {source.path} cannot be read: {reason}") from error


@contextmanager
def _silence() -> Iterator[None]:
    """Without the bars and the log of datasets: its errors are told in one line of ours."""
    import datasets

    silent, verbosity = datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if not silent:
            datasets.enable_progress_bars()


def _text(row: dict[str, Any], source: DataSource, number: int) -> str:
    place = f"row {number} of the Hub dataset {source.path}"
    if source.column not in row:
        raise missing_column(place, source.column, row)
    return checked_text(row[source.column], source.column, place)
