"""What goes wrong with cards and with publishing."""


class CardError(ValueError):
    """A card could not be made: the message says why; the folder is as it was."""


class FolderError(ValueError):
    """A folder is not fit to be published: the message says what is wrong with it."""
