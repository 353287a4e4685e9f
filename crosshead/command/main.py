"""`crosshead`: the table of commands, and what happens when one fails."""

import os
import sys
import traceback
from collections.abc import Callable
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

GROUPS = {
    "Convert": ("convert", "verify", "fold"),
    "Train": ("train", "sweep"),
    "Evaluate": ("eval", "cost", "bench", "probe"),
    "Inspect": ("inspect",),
    "Publish": ("card", "push", "zoo"),
    "Try": ("demo",),
}
"""The sections of `crosshead --help`."""
COMMANDS: dict[str, Callable[..., Any]] = {
    "convert": convert.convert,
    "cost": cost.cost,
    "eval": eval.evaluate,
    "fold": fold.fold,
    "inspect": inspect.inspect,
    "verify": verify.verify,
    "train": train.train,
    "sweep": sweep.sweep,
    "card": card.card,
    "push": push.push,
}
DEBUG = "--debug"
INTERRUPTED = 130
RESUMABLE = {"convert", "demo", "fold", "push"}
"""Commands that keep what they have done; train and sweep end by themselves, and say so."""
EXTRAS = {"accelerate": "train", "datasets": "train", "lm_eval": "eval", "peft": "train", "scipy": "eval"}
"""Packages that a command may need -> the extra that brings them."""


class GroupedCommands(TyperGroup):
    """Lists commands by section in `--help`."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one section for each group."""
        width = formatter.width - 6 - max(map(len, self.commands))
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(width)) for name in names])


app = typer.Typer(
    name="crosshead",
    help="Attention mechanisms across heads for Llama and Qwen models: convert, train, evaluate, publish.",
    no_args_is_help=True,
    cls=GroupedCommands,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _name, _function in COMMANDS.items():
    app.command(_name, no_args_is_help=True, cls=StrictCommand)(_function)
app.command("demo", cls=StrictCommand)(demo.demo)  # also without a word behind it
app.command("zoo", cls=StrictCommand)(zoo.zoo)
app.add_typer(bench.app, name="bench")
app.add_typer(probe.app, name="probe")


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option(DEBUG, help="Show the traceback of an error.")] = False,
) -> None:
    """What holds for every command."""
    if version:
        from importlib.metadata import version as installed

        print(f"crosshead {installed('crosshead')}")
        raise typer.Exit


def main() -> None:
    """Run one command: exit status 0, or 1 with one line on stderr, or 2 for wrong usage."""
    arguments = sys.argv[1:]
    debug = DEBUG in arguments
    arguments = [argument for argument in arguments if argument != DEBUG]  # wherever it stands
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its warnings speak to programmers
    if "transformers" in sys.modules:  # under `python -m`, where the variable comes too late
        sys.modules["transformers"].logging.set_verbosity_error()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # what it cannot show, it spells
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    told = ""
    try:
        status = app(args=arguments, standalone_mode=False)
    except InterruptedByUserError as error:
        status, told = INTERRUPTED, str(error)
    except (typer.Abort, KeyboardInterrupt):
        status = INTERRUPTED
    except Exception as error:
        status = _status_of(error, debug)
    if status == INTERRUPTED:  # which typer makes of Ctrl-C, in some versions
        if not told and RESUMABLE.intersection(arguments[:1]):
            told = "the same command goes on where this one stopped"
        complain(f"interrupted: {told}" if told else "interrupted", INTERRUPTED)
    sys.exit(status if isinstance(status, int) else 0)


def _status_of(error: Exception, debug: bool) -> int:
    if isinstance(error, typer.Exit):
        return error.exit_code
    show = getattr(error, "show", None)  # click's own errors are about usage
    if show is not None and getattr(error, "exit_code", 1) == 2:
        show()
        return 2
    if debug:
        traceback.print_exception(error)
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        message += f": pip install 'crosshead[{EXTRAS[error.name]}]'"
    message = "; ".join([message, *(" ".join(note.split()) for note in getattr(error, "__notes__", []))])
    return complain(f"error: {message}", 1)


def complain(message: str, status: int) -> int:
    """One line on stderr, whole where several processes write to it at once; returns the status."""
    sys.stderr.write(f"crosshead: {message}\n")
    return status
