"""The error that a user sees as one line."""


class RecipeError(ValueError):
    """A recipe or its data cannot be used: the message names what is wrong, its value, and what to do."""


def one_line(error: BaseException) -> str:
    """What another package's exception says, without line breaks; its kind where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__
