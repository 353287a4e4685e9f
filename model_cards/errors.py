"""Errors of cards and of publishing."""


class CardError(ValueError):
    """A card cannot be written; the folder is unchanged."""


class FolderError(ValueError):
    """A folder cannot be published."""
