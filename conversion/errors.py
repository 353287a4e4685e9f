"""The error that a user sees as one line."""

UNSPOKEN = (LookupError, ArithmeticError, AttributeError)
"""Exceptions whose message is a bare name or number."""


class ConversionError(ValueError):
    """Something given cannot be converted: the message names it, its value, and what to do."""


def one_line(error: BaseException) -> str:
    """An exception's message without line breaks, with its kind where the message alone says too little."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__} {message}".strip() if isinstance(error, UNSPOKEN) or not message else message
