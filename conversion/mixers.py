"""The requested mechanisms of a conversion, from the command line, a YAML recipe or Python.

Values may be strings, as in `mixture:active_heads=75%` or `knocking:on=query+value`; the type of each option decides
how they are parsed. Options that only a conversion has (`method`, `shared`) are separate from those of a config. For a
T5, a mechanism may name parts of the model, as in `talking@encoder+cross`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from crosshead.common.errors import ConversionError
from crosshead.modeling.backbones.t5 import PARTS
from crosshead.modeling.configuration import LAYERS
from crosshead.modeling.mechanisms import MECHANISMS, RULES
from crosshead.modeling.mechanisms.base import HeadLayout
from crosshead.modeling.options import (
    Choice,
    Count,
    Flag,
    Integer,
    Layers,
    Number,
    Option,
    Subset,
    is_whole,
    unknown,
)

from .architectures.attention_names import parts_of
from .options import as_number

CONVERSION_OPTIONS: dict[str, dict[str, Choice]] = {
    "explicit": {"method": Choice(("aligned", "svd"))},
    "mixture": {"method": Choice(("calibrated", "paper")), "shared": Choice(("first", "calibrated"))},
}
"""Mechanism -> options that only a conversion has; a config does not contain them."""
Mixers = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class MixerRequest:
    """The requested mechanisms with parsed options."""

    mixers: Mixers
    """Mechanism -> options in the config; for a T5, part -> mechanism -> options."""
    choices: dict[str, dict[str, Any]]
    """Mechanism -> options that only the conversion has; for a T5, part -> mechanism -> options."""
    parts: Mapping[str, "MixerRequest"] = field(default_factory=dict)
    """Part of a T5 (encoder, decoder, cross) -> the request for this part; empty for other models."""

    @property
    def by_part(self) -> list["MixerRequest"]:
        """The requests for the parts of a T5; for other models, a list of the request itself."""
        return [*self.parts.values()] or [self]


def read_request(requested: Mapping[str, Any], config: Any) -> MixerRequest:
    """Return the request with typed values of all options; `config` is a crosshead config, with or without mixers."""
    if not isinstance(requested, Mapping):
        raise ConversionError(
            f"mixers={requested!r} is not allowed: use a mapping of mechanism to options, such as {{'knocking': {{}}}}"
        )
    for key in requested:
        if not isinstance(key, str):
            raise ConversionError(f"mixers has the key {key!r}: use the name of a mechanism")
    layouts, parts = config.layouts(), parts_of(config)
    if parts:
        return _read_parts(requested, {part: [layouts[layer] for layer in parts[part]] for part in parts})
    for key in requested:
        if "@" in key or key in PARTS:
            family = config.model_type.removeprefix("crosshead_")
            raise ConversionError(f"--mixer {key}: {family} models have no such parts; name the mechanism alone")
    return read_mixers(requested, layouts)


def _read_parts(requested: Mapping[str, Any], layouts: Mapping[str, list[HeadLayout]]) -> MixerRequest:
    """Return the request for a T5, given the head layouts of each part.

    A key of `requested` is a mechanism (for all parts), a mechanism with parts such as `talking@encoder+cross`, or, as
    in a config, a part that maps mechanisms to options.
    """
    mixers_by_part: dict[str, dict[str, Any]] = {part: {} for part in layouts}
    for key, entry in requested.items():
        for part, mechanism, options in _by_part(key, entry, layouts):
            if part not in mixers_by_part:
                raise ConversionError(str(unknown(f"--mixer {key}", "part of the model", part, list(layouts))))
            if mechanism in mixers_by_part[part]:
                raise ConversionError(f"--mixer {mechanism} is given twice for the part {part!r}: give it once")
            mixers_by_part[part][mechanism] = options
    parts = {part: read_mixers(mixers, layouts[part]) for part, mixers in mixers_by_part.items() if mixers}
    mixers = {part: request.mixers for part, request in parts.items()}
    return MixerRequest(mixers, {part: request.choices for part, request in parts.items()}, parts)


def _by_part(key: str, entry: Any, layouts: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield (part, mechanism, options) for every part that an entry of a request applies to."""
    if key in PARTS:
        if not isinstance(entry, Mapping):
            raise ConversionError(f"mixers.{key}={entry!r} is not allowed: use a mapping of mechanism to options")
        yield from ((key, mechanism, options) for mechanism, options in entry.items())
        return
    mechanism, at, parts = key.partition("@")
    yield from ((part, mechanism, entry) for part in (parts.split("+") if at else layouts))


def read_mixers(requested: Mapping[str, Any], layouts: list[HeadLayout]) -> MixerRequest:
    """Return the request with typed values of all options; the config checks later whether they fit the model."""
    mixers: Mixers = {}
    choices: Mixers = {}
    for name, options in requested.items():
        mixers[name], choices[name] = _read_options(name, options, layouts)
    if "mixture" in mixers and choices["mixture"]["method"] == "paper":
        _share_half(mixers["mixture"], layouts[0].query_heads)
    _check_combination(mixers, choices)
    return MixerRequest(mixers, choices)


def _read_options(name: str, options: Any, layouts: list[HeadLayout]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the typed options of a mechanism: those of the config, and those that only a conversion has."""
    if name not in MECHANISMS:
        raise ConversionError(str(unknown("--mixer", "mechanism", name, list(MECHANISMS))))
    options = {} if options is None else options
    if not isinstance(options, Mapping):
        raise ConversionError(f"mixers.{name}={options!r} is not allowed: use a mapping of option to value")
    of_config: Mapping[str, Option] = {**RULES[name].options, LAYERS: Layers()}
    of_conversion = CONVERSION_OPTIONS.get(name, {})
    for key in options:
        if key not in of_config and key not in of_conversion:
            raise ConversionError(str(unknown(f"mixers.{name}", "option", key, [*of_config, *of_conversion])))
    options = _with_defaults(name, options)
    try:
        choices = {
            key: kind.parse(f"mixers.{name}.{key}", options.get(key), len(layouts))
            for key, kind in of_conversion.items()
        }
    except ValueError as error:
        raise ConversionError(str(error)) from None
    values = {key: _parse(name, key, of_config[key], options[key], layouts) for key in options if key in of_config}
    return values, choices


def _with_defaults(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with the defaults for a pretrained model that differ from those for a new model."""
    if name == "mixture":  # a fitted two_stage router, or the paper's method if an option implies it
        is_paper = options.get("method") == "paper" or "shared" in options or options.get("router") == "query_norm"
        router = {"router": "query_norm"} if is_paper else {"router": "two_stage", "shared_heads": 0}
        return {"method": "paper" if is_paper else "calibrated", "gate": "binary"} | router | dict(options)
    if name == "explicit" or (name == "differential" and str(options.get("half_values")).lower() == "true"):
        return {"norm": False} | dict(options)
    return dict(options)


def _check_combination(mixers: Mixers, choices: Mixers) -> None:
    """Raise `ConversionError` if options do not go together, within `mixture` or across mechanisms."""
    mixture, method = mixers.get("mixture", {}), choices.get("mixture", {}).get("method")
    for option, value in (("router", "two_stage"), ("gate", "binary")):
        if method == "calibrated" and mixture[option] != value:
            raise ConversionError(
                f"mixers.mixture.{option}={mixture[option]!r} does not go together with "
                f"method='calibrated', which fits router='two_stage' with gate='binary': use method=paper"
            )
    if method == "calibrated" and "differential" in mixers:
        raise ConversionError(
            "mixers.mixture.method='calibrated' does not go together with 'differential', which pairs heads: use "
            "method=paper and router=two_stage"
        )
    groups = mixers.get("explicit", {}).get("groups", 1)
    if groups != 1 and choices.get("mixture", {}).get("shared") == "calibrated":
        raise ConversionError(
            f"mixers.explicit.groups={groups!r} does not go together with mixers.mixture.shared='calibrated', which "
            "moves heads to other groups: use shared=first"
        )


def _parse(name: str, key: str, kind: Option, value: Any, layouts: list[HeadLayout]) -> Any:
    """Return a string as a value of the option's type, and other values unchanged."""
    if isinstance(kind, Count):
        heads = layouts[0].query_heads if name == "mixture" else layouts[0].key_value_heads
        return _parse_counts(f"mixers.{name}.{key}", value, heads)
    if isinstance(kind, Layers | Subset):
        parts = value.split("+") if isinstance(value, str) else value
        return [as_number(part) for part in parts] if isinstance(kind, Layers) and isinstance(parts, list) else parts
    if not isinstance(value, str):
        return value
    if isinstance(kind, Flag):
        return {"true": True, "false": False}.get(value.lower(), value)
    return as_number(value) if isinstance(kind, Integer | Number) else value


def _parse_counts(name: str, value: Any, heads: int) -> Any:
    """Return a number of heads or a list of them; a percentage is converted to a part of `heads`."""
    if isinstance(value, str) and "+" in value:
        value = value.split("+")
    if isinstance(value, list | tuple):
        return [_parse_counts(name, part, heads) for part in value]
    if not (isinstance(value, str) and value.endswith("%")):
        return as_number(value)
    percentage = as_number(value[:-1])
    if not isinstance(percentage, int | float) or not 0 <= percentage <= 100:
        raise ConversionError(f"{name}={value!r} is not allowed: use a percentage from 0% to 100%")
    return max(round(heads * percentage / 100), 1 if percentage else 0)


def _share_half(options: dict[str, Any], heads: int) -> None:
    """Set the default of `shared_heads`: half of all heads, as in the paper's continued training.

    Layers with at most that many active heads share half of their active heads.
    """
    active, half = options.get("active_heads"), heads // 2
    counts: list[Any] = active if isinstance(active, list) else [active]
    if "shared_heads" in options or not all(is_whole(count) and count > 0 for count in counts):
        return  # the config's own check reports wrong counts
    if max(counts, default=0) > half:
        shared = [half if count > half else count // 2 for count in counts]
        options["shared_heads"] = shared if isinstance(active, list) else shared[0]
