"""Reads the rows of a dataset on the Hub or of a local copy; every error of datasets becomes one line."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .errors import one_line

EMPTY_SPLIT = ("BatchSize must be greater than 0", "corresponds to no data", "at least one example", "StopIteration")
"""Parts of the error messages of datasets about a split or a file without rows."""


def hub_rows(
    path: str, subset: str | None, columns: Sequence[str], error_type: type[ValueError], **options: Any
) -> Iterator[dict[str, Any]]:
    """All rows with the requested columns that exist; with all columns if none of them exists.

    `options` are arguments of `datasets.load_dataset`, at least `split`. Errors are raised as `error_type`.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise error_type('Hub datasets need the datasets package: pip install "crosshead[train]"') from error
    with reading_hub(path, options["split"], error_type):
        rows = load_dataset(path, subset, **options)
        present = [column for column in columns if column in (rows.column_names or ())]
        if present:
            rows = rows.select_columns(present)  # decoding other columns, such as images, would take time
        yield from rows


@contextmanager
def reading_hub(path: str, split: str, error_type: type[ValueError]) -> Iterator[None]:
    """A context that turns every error of datasets into an `error_type` with a message of one line."""
    try:
        with _silent_datasets():
            yield
    except error_type:
        raise
    except Exception as error:  # of the library, the network or a file format
        reason = one_line(error.__cause__ or error)
        if any(words in reason for words in EMPTY_SPLIT):
            raise error_type(
                f"the Hub dataset {path} has an empty split {split!r}, or an empty file in it: choose another, or "
                "remove the file"
            ) from error
        raise error_type(f"the Hub dataset {path} cannot be read: {reason}") from error


@contextmanager
def _silent_datasets() -> Iterator[None]:
    """A context without progress bars and log messages of datasets."""
    import datasets

    is_silent, verbosity = datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if not is_silent:
            datasets.enable_progress_bars()
