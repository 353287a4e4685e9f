"""A config's `mixers`: checked and completed as a whole, then read layer by layer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .mechanisms import MECHANISMS
from .mixer import HeadLayout, Settings
from .options import Layers, unknown

LAYERS = "layers"


def complete_mixers(mixers: Any, layouts: list[HeadLayout]) -> dict[str, Settings]:
    """The mapping with every default filled in, in its order; `ValueError` where it cannot work with the layers."""
    if not isinstance(mixers, Mapping):
        raise ValueError(f"mixers={mixers!r} is not allowed: use a mapping of mechanism to options")
    complete = {name: _complete(name, options, layouts) for name, options in mixers.items()}
    for layout in layouts:
        check_layer(layer_settings(complete, layout.layer_index), layout)
    return complete


def _complete(name: str, options: Any, layouts: list[HeadLayout]) -> Settings:
    if name not in MECHANISMS:
        raise unknown("mixers", "mechanism", name, list(MECHANISMS))
    options = {} if options is None else options
    if not isinstance(options, Mapping):
        raise ValueError(f"mixers.{name}={options!r} is not allowed: use a mapping of option to value")
    mechanism = MECHANISMS[name]
    known = {**mechanism.options, LAYERS: Layers()}
    for option in options:
        if option not in known:
            raise unknown(f"mixers.{name}", "option", option, list(known))
    # Options that were not given and have no default of their own stay out.
    parsed = {
        option: value
        for option, kind in known.items()
        if (value := kind.parse(f"mixers.{name}.{option}", options.get(option), len(layouts))) is not None
    }
    return mechanism.complete(parsed)


def layer_settings(mixers: Mapping[str, Settings], layer: int) -> dict[str, Settings]:
    """The complete options of the mechanisms that work in one layer, counts resolved, in the order of the config."""
    return {
        name: {
            option: MECHANISMS[name].options[option].at(value, layer)
            for option, value in options.items()
            if option != LAYERS
        }
        for name, options in mixers.items()
        if layer in options.get(LAYERS, [layer])
    }


def shared_layout(settings: Mapping[str, Settings], layout: HeadLayout) -> HeadLayout:
    """The layout as the mechanisms of one layer see it."""
    layout = replace(layout, output_heads=layout.query_heads)
    for name in settings:
        layout = MECHANISMS[name].reshape(layout)
    return layout


def check_layer(settings: dict[str, Settings], layout: HeadLayout) -> None:
    """`ValueError` where a mechanism cannot work in this layer, alone or beside the others."""
    layout = shared_layout(settings, layout)
    if settings and layout.query_heads % max(layout.key_value_heads, 1) != 0:
        raise ValueError(
            f"mixers need query heads in equal groups: num_attention_heads={layout.query_heads} is not a multiple of "
            f"num_key_value_heads={layout.key_value_heads}"
        )
    owners = [name for name in settings if MECHANISMS[name].owns_attention]
    if len(owners) > 1:
        raise ValueError(
            f"{' and '.join(f'mixers.{name}' for name in owners)} both replace the attention step (layer "
            f"{layout.layer_index}): use them in different layers"
        )
    for name, options in settings.items():
        try:
            MECHANISMS[name].check(options, layout, settings)
        except ValueError as error:
            raise ValueError(f"{error} (layer {layout.layer_index})") from None
