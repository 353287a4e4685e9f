"""A command that refuses an option in place of another option's value."""

from pathlib import Path
from typing import Any

from typer import BadParameter
from typer.core import TyperCommand, TyperOption


class StrictCommand(TyperCommand):
    """Refuses option values that begin with `-`, but for numbers: in `--toy --dry-run` the value is missing."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments that remain after the options are read."""
        rest = super().parse_args(ctx, args)
        for parameter in self.params:
            if isinstance(parameter, TyperOption):
                _check(parameter, ctx)
        return rest


def _check(option: TyperOption, ctx: Any) -> None:
    value = ctx.params.get(option.name)
    for each in value if isinstance(value, list | tuple) else [value]:
        if isinstance(each, str | Path) and str(each).startswith("-"):
            name = max(option.opts, key=len)
            raise BadParameter(f"{str(each)!r} is not a value: give one between {name} and {each}", ctx, option)
