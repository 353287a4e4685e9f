"""Documents of a dataset on the Hub."""

import re
from collections.abc import Iterator
from typing import Any

from .column_text import checked_text, missing_column
from .data_options import DataSource
from .errors import RecipeError, one_line

_QUERY = re.compile(r"\?\S*")
"""The part of an address in which a signature may stand."""


def hub_documents(source: DataSource) -> Iterator[str]:
    """The texts of a dataset in its own order, `RecipeError` where it cannot be loaded or read to its end."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise RecipeError('Hub datasets need the datasets package: pip install "crosshead[train]"') from error
    options = {"split": source.split, "revision": source.revision, "streaming": source.streaming}
    try:
        rows = load_dataset(source.path, source.subset, **options)
        if rows.column_names is not None and source.column in rows.column_names:
            rows = rows.select_columns([source.column])  # the others may be images
        for number, row in enumerate(rows, 1):
            yield _text(row, source, number)
    except RecipeError:
        raise
    except Exception as error:  # of the library, of the network, of the file formats
        reason = _QUERY.sub("", one_line(error.__cause__ or error))
        raise RecipeError(f"the Hub dataset {source.path} cannot be read: {reason}") from error


def _text(row: dict[str, Any], source: DataSource, number: int) -> str:
    place = f"row {number} of the Hub dataset {source.path}"
    if source.column not in row:
        raise missing_column(place, source.column, row)
    return checked_text(row[source.column], source.column, place)
