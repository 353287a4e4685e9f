"""`crosshead`: the entry point, with the table of commands and the handling of errors."""

import errno
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from crosshead_command import (
    bench,
    card,
    convert,
    cost,
    demo,
    eval,
    fold,
    inspect,
    probe,
    push,
    sweep,
    train,
    verify,
    zoo,
)
from crosshead_command.screen import InterruptedByUserError
from crosshead_command.strict import StrictCommand

COMMANDS: dict[str, dict[str, Any]] = {
    "Convert": {"convert": convert.convert, "verify": verify.verify, "fold": fold.fold},
    "Train": {"train": train.train, "sweep": sweep.sweep},
    "Evaluate": {"eval": eval.evaluate, "cost": cost.cost, "bench": bench.app, "probe": probe.app},
    "Inspect": {"inspect": inspect.inspect},
    "Publish": {"card": card.card, "push": push.push, "zoo": zoo.zoo},
    "Try": {"demo": demo.demo},
}
"""Section of `crosshead --help` -> command -> function, or typer group of commands for `bench` and `probe`."""
RUN_WITHOUT_ARGUMENTS = {"demo", "zoo"}
"""Commands that run without arguments; the others then print their help."""
DEBUG = "--debug"
INTERRUPTED, TERMINATED = 130, 143
"""Exit statuses after SIGINT and SIGTERM, as a shell reports them."""
RESUMABLE = {"convert", "demo", "fold", "push"}
"""Commands that continue an interrupted run when repeated; train and sweep print their own message about that."""
EXTRAS = {
    "accelerate": "train",
    "datasets": "train",
    "lm_eval": "eval",
    "matplotlib": "inspect",
    "peft": "train",
    "scipy": "eval",
}
"""Optional package -> the extra of crosshead that installs it."""


class GroupedCommands(TyperGroup):
    """A group whose `--help` lists the commands by section."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one section of the help for each entry of COMMANDS."""
        width = formatter.width - 6 - max(map(len, self.commands))
        for title, names in COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(width)) for name in names])


app = typer.Typer(
    name="crosshead",
    help="Attention mechanisms across heads for pretrained models: convert, train, evaluate, publish.",
    no_args_is_help=True,
    cls=GroupedCommands,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _commands in COMMANDS.values():
    for _name, _command in _commands.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name)
        else:
            app.command(_name, no_args_is_help=_name not in RUN_WITHOUT_ARGUMENTS, cls=StrictCommand)(_command)


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option(DEBUG, help="Show the traceback of an error.")] = False,
) -> None:
    """Options of the whole program."""
    if version:
        from importlib.metadata import version as installed

        print(f"crosshead {installed('crosshead')}")
        raise typer.Exit


def main() -> None:
    """Run one command. Exit status: 0, 1 for an error (a line on stderr), 2 for wrong usage, 130 or 143 if stopped."""
    arguments = sys.argv[1:]
    debug = DEBUG in arguments
    arguments = [argument for argument in arguments if argument != DEBUG]  # at any position
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its warnings address programmers, not users
    if "transformers" in sys.modules:  # `python -m crosshead` imports it earlier
        sys.modules["transformers"].logging.set_verbosity_error()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # escape characters that the terminal lacks
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    message = ""
    try:
        with ending_by_signal() as signals:
            status = app(args=arguments, standalone_mode=False)
            sys.stdout.flush()
    except InterruptedByUserError as error:
        status, message = INTERRUPTED, str(error)
    except (typer.Abort, KeyboardInterrupt):
        status = INTERRUPTED
    except Exception as error:
        status = _status_of(error, debug)
    if status == INTERRUPTED:  # also the status that some versions of typer return for Ctrl-C
        if not message and RESUMABLE.intersection(arguments[:1]):
            message = "run the same command again to continue"
        status, word = (TERMINATED, "terminated") if signals else (INTERRUPTED, "interrupted")
        complain(f"{word}: {message}" if message else word, status)
    sys.exit(status if isinstance(status, int) else 0)


@contextmanager
def ending_by_signal() -> Iterator[list[int]]:
    """A context in which the first SIGTERM acts like Ctrl-C, so that cleanup runs; yields the received signals."""
    signals: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        signals.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # the caller ignores or handles SIGTERM
        yield signals
        return
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield signals
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _status_of(error: Exception, debug: bool) -> int:
    """Print an error, with its traceback if `debug`; return the exit status."""
    if isinstance(error, BrokenPipeError):  # the reader of a pipe, such as `head`, has ended
        return 1
    if isinstance(error, typer.Exit):
        return error.exit_code
    show = getattr(error, "show", None)  # a usage error of click
    if show is not None and getattr(error, "exit_code", 1) == 2:
        show()
        return 2
    if debug:
        traceback.print_exception(error)
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        message = f"the output cannot be written: {error.strerror}"
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        message += f": pip install 'crosshead[{EXTRAS[error.name]}]'"
    message = "; ".join([message, *(" ".join(note.split()) for note in getattr(error, "__notes__", []))])
    return complain(f"error: {message}", 1)


def complain(message: str, status: int) -> int:
    """Write one line to stderr in one call, so that lines of several processes do not mix; return the status."""
    printable = "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in message
    )  # escapes control sequences of the terminal
    sys.stderr.write(f"crosshead: {printable}\n")
    return status
