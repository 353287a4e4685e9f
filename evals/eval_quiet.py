"""What other packages say while they work: nothing on stdout, and nothing at all where nobody watches."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout

TALKERS = ("lm_eval", "datasets", "huggingface_hub", "transformers", "accelerate")


@contextmanager
def quiet() -> Iterator[None]:
    """Keep their remarks back: what goes wrong comes as an exception. Progress bars go to a terminal alone."""
    loggers = [logging.getLogger(name) for name in TALKERS]
    levels = [logger.level for logger in loggers]
    with ExitStack() as stack:
        if sys.stderr.isatty():
            stack.enter_context(redirect_stdout(sys.stderr))
        else:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        try:
            for logger in loggers:
                logger.setLevel(logging.CRITICAL)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
