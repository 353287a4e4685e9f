"""Parsing of mechanisms for the parts of a T5, such as `talking@encoder+cross`."""

from collections.abc import Iterator, Mapping
from typing import Any

from crosshead.common.errors import ConversionError
from crosshead.modeling.backbones.t5 import PARTS
from crosshead.modeling.mechanisms.base import HeadLayout
from crosshead.modeling.options import unknown

from .architectures.stacks import parts_of
from .options import MixerRequest, read_mixers


def read_request(requested: Mapping[str, Any], config: Any) -> MixerRequest:
    """Return the request with typed values of all options; `config` is a crosshead config, with or without mixers."""
    layouts, parts = config.layouts(), parts_of(config)
    if parts:
        return read_parts(requested, {part: [layouts[layer] for layer in parts[part]] for part in parts})
    for key in requested:
        if "@" in key or key in PARTS:
            family = config.model_type.removeprefix("crosshead_")
            raise ConversionError(f"--mixer {key}: {family} models have no such parts; name the mechanism alone")
    return read_mixers(requested, layouts)


def read_parts(requested: Mapping[str, Any], layouts: Mapping[str, list[HeadLayout]]) -> MixerRequest:
    """Return the request for a T5, given the head layouts of each part.

    A key of `requested` is a mechanism (for all parts), a mechanism with parts such as `talking@encoder+cross`, or, as
    in a config, a part that maps mechanisms to options.
    """
    of_parts: dict[str, dict[str, Any]] = {part: {} for part in layouts}
    for key, given in requested.items():
        for part, mechanism, options in _placed(key, given, layouts):
            if part not in of_parts:
                raise ConversionError(str(unknown(f"--mixer {key}", "part of the model", part, list(layouts))))
            if mechanism in of_parts[part]:
                raise ConversionError(f"--mixer {mechanism} is given twice for the part {part!r}: give it once")
            of_parts[part][mechanism] = options
    parts = {part: read_mixers(mixers, layouts[part]) for part, mixers in of_parts.items() if mixers}
    mixers = {part: request.mixers for part, request in parts.items()}
    return MixerRequest(mixers, {part: request.choices for part, request in parts.items()}, parts)


def _placed(key: str, given: Any, layouts: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield (part, mechanism, options) for every part that an entry of a request applies to."""
    if key in PARTS:
        if not isinstance(given, Mapping):
            raise ConversionError(f"mixers.{key}={given!r} is not allowed: use a mapping of mechanism to options")
        yield from ((key, mechanism, options) for mechanism, options in given.items())
        return
    mechanism, at, parts = key.partition("@")
    yield from ((part, mechanism, given) for part in (parts.split("+") if at else layouts))
