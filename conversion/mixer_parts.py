"""Parsing of mechanisms for the parts of a T5, such as `talking@encoder+cross`."""

from collections.abc import Iterator, Mapping
from typing import Any

from crosshead.common.errors import ConversionError
from crosshead.modeling.backbones.t5 import PARTS
from crosshead.modeling.mechanisms.base import HeadLayout
from crosshead.modeling.options import unknown

from .architectures.attention_names import parts_of
from .options import MixerRequest, read_mixers


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
