"""A command that rejects an option in the position of another option's value."""

from pathlib import Path
from typing import Any

from typer import BadParameter
from typer.core import TyperCommand, TyperOption


class StrictCommand(TyperCommand):
    """Rejects option values that begin with `-`, except numbers: in `--toy --dry-run` the value is missing."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse and check the options; return the remaining arguments."""
        rest = super().parse_args(ctx, args)
        for parameter in self.params:
            if isinstance(parameter, TyperOption):
                _check(parameter, ctx)
        return rest


def _check(option: TyperOption, ctx: Any) -> None:
    value = ctx.params.get(option.name)
    for item in value if isinstance(value, list | tuple) else [value]:
        if isinstance(item, str | Path) and str(item).startswith("-"):
            name = max(option.opts, key=len)
            raise BadParameter(f"{str(item)!r} is not a value: give one between {name} and {item}", ctx, option)
