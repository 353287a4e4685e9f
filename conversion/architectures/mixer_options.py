"""What a user asks of the mechanisms, from the command line, a recipe or Python, as a config's `mixers`.

Values may be text, as in `mixture:active_heads=75%` or `knocking:on=query+value`: the kind of each option says how
it is read. Options that only a conversion knows (`method`, `shared`) are kept apart from those a config stores.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crosshead.common.errors import ConversionError
from crosshead.modeling.configuration import LAYERS
from crosshead.modeling.mechanisms import MECHANISMS, RULES
from crosshead.modeling.mechanisms.base import HeadLayout
from crosshead.modeling.options import Choice, Count, Flag, Integer, Layers, Number, Option, Subset, is_whole, unknown

ONLY_HERE: dict[str, dict[str, Choice]] = {
    "explicit": {"method": Choice(("aligned", "svd"))},
    "mixture": {"shared": Choice(("first", "calibrated"))},
}
"""Options of a conversion that no config stores."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "explicit": {"norm": False},
    "mixture": {"router": "query_norm", "gate": "binary"},
}
"""Where a pretrained model wants another default than a fresh one."""
Mixers = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class MixerRequest:
    """What was asked for."""

    mixers: Mixers
    """For the config."""
    choices: dict[str, dict[str, str]]
    """For the conversion: mechanism -> option -> value."""


def split_argument(argument: str) -> tuple[str, dict[str, str]]:
    """`NAME[:key=value,...]` as name and options."""
    name, _, rest = argument.partition(":")
    options: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise ConversionError(f"--mixer {argument!r}: {part!r} is not key=value; lists are joined by +, as in a+b")
        if key in options:
            raise ConversionError(f"--mixer {argument!r} gives {key!r} twice")
        options[key] = value
    return name, options


def read_mixers(asked: Mapping[str, Any], layouts: list[HeadLayout]) -> MixerRequest:
    """Typed values for every option; whether they suit the model, the config checks."""
    mixers: Mixers = {}
    choices: dict[str, dict[str, str]] = {}
    for name, options in asked.items():
        if name not in MECHANISMS:
            raise ConversionError(str(unknown("--mixer", "mechanism", name, list(MECHANISMS))))
        given = {} if options is None else options
        if not isinstance(given, Mapping):
            raise ConversionError(f"mixers.{name}={given!r} is not allowed: use a mapping of option to value")
        here = ONLY_HERE.get(name, {})
        choices[name] = {key: _choice(name, key, kind, given.get(key), len(layouts)) for key, kind in here.items()}
        kinds: dict[str, Option] = {**RULES[name].options, LAYERS: Layers()}
        for key in given:
            if key not in kinds and key not in here:
                raise ConversionError(str(unknown(f"mixers.{name}", "option", key, [*kinds, *here])))
        values = {key: _typed(name, key, kinds[key], given[key], layouts) for key in given if key in kinds}
        mixers[name] = DEFAULTS.get(name, {}) | values
    if "mixture" in mixers:
        _share_half(mixers["mixture"], layouts[0].query_heads)
    return MixerRequest(mixers, choices)


def _share_half(options: dict[str, Any], heads: int) -> None:
    """The paper's continued training shares half of all heads; layers with fewer active heads share half of those."""
    active, half = options.get("active_heads"), heads // 2
    counts: list[Any] = active if isinstance(active, list) else [active]
    if "shared_heads" in options or not all(is_whole(count) and count > 0 for count in counts):
        return  # the config refuses a wrong count by its own name
    if max(counts, default=0) > half:
        shared = [half if count > half else count // 2 for count in counts]
        options["shared_heads"] = shared if isinstance(active, list) else shared[0]


def _choice(name: str, key: str, kind: Choice, value: Any, layers: int) -> str:
    try:
        return kind.parse(f"mixers.{name}.{key}", value, layers)
    except ValueError as error:
        raise ConversionError(str(error)) from None


def _typed(name: str, key: str, kind: Option, value: Any, layouts: list[HeadLayout]) -> Any:
    """Text as the kind of option it stands for; anything else as it is."""
    if isinstance(kind, Count):
        return _counts(f"mixers.{name}.{key}", value, _whole(name, key, layouts[0]))
    if isinstance(kind, Layers | Subset):
        parts = value.split("+") if isinstance(value, str) else value
        return [_number(part) for part in parts] if isinstance(kind, Layers) and isinstance(parts, list) else parts
    if not isinstance(value, str):
        return value
    if isinstance(kind, Flag):
        return {"true": True, "false": False}.get(value.lower(), value)
    return _number(value) if isinstance(kind, Integer | Number) else value


def _number(text: Any) -> Any:
    """Text as an int or a float where it is one."""
    for read in (int, float) if isinstance(text, str) else ():
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _whole(name: str, key: str, layout: HeadLayout) -> int:
    """What a percentage of heads is a percentage of."""
    return layout.query_heads if name == "mixture" else layout.key_value_heads


def _counts(name: str, value: Any, whole: int) -> Any:
    """Counts as numbers: one or a list, each a number or a percentage."""
    if isinstance(value, str) and "+" in value:
        value = value.split("+")
    if isinstance(value, list | tuple):
        return [_counts(name, part, whole) for part in value]
    if not (isinstance(value, str) and value.endswith("%")):
        return _number(value)
    share = _number(value[:-1])
    if not isinstance(share, int | float) or not 0 <= share <= 100:
        raise ConversionError(f"{name}={value!r} is not allowed: a percentage goes from 0% to 100%")
    return max(round(whole * share / 100), 1 if share else 0)
