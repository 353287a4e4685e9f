"""The error that a user sees as one line."""


class RecipeError(ValueError):
    """A recipe or its data cannot be used: the message names what is wrong, its value, and what to do."""


class DivergedError(RecipeError):
    """The loss, and not the disk or the data, has ended a run."""


def one_line(error: BaseException) -> str:
    """What another package's exception says, without line breaks; its kind where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__
