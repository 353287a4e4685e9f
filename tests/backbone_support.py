"""The table of supported mechanisms per backbone; each pair is tried with a tiny configuration and default options."""

import re
from typing import Any

import crosshead
import toys
import transnext_toys
from image_toys import IMAGE_BACKBONES

DIT = "DiT"
ACTIVE = {"mixture": {"active_heads": 2}}
"""Values of required options. Toys have four heads, two in the first stage of TransNeXt."""
REASON = re.compile(r"mixers(?:\.\w+)*=.* is not allowed: ([^;]*?)(?:; DiT takes .*| \(layer 0\))?")
"""Matches a refusal message; group 1 is the reason without the value, the layer and the accepted values."""


def backbones() -> list[str]:
    """Return the names of all backbones as in their class names."""
    return [*(config.class_prefix.removeprefix("Crosshead") for config in crosshead.FAMILIES), DIT]


def build(backbone: str, mechanism: str) -> Any:
    """Return a tiny configuration (for DiT a model); raise ValueError if the backbone refuses the mechanism."""
    mixers = {mechanism: ACTIVE.get(mechanism, {})}
    if backbone == DIT:
        import dit_toys

        return dit_toys.CrossheadDiTTransformer2DModel(**dit_toys.SIZES, mixers=mixers)
    if backbone == "TransNext":
        return crosshead.CrossheadTransNextConfig(**transnext_toys.SIZES, mixers=mixers)
    if backbone in IMAGE_BACKBONES:
        return getattr(crosshead, f"Crosshead{backbone}Config")(**toys.IMAGE_SIZES, mixers=mixers)
    return toys.mixed_config(backbone, mixers)


def refusal(backbone: str, mechanism: str) -> str | None:
    """Return the reason why the backbone refuses the mechanism, or None if it is supported."""
    try:
        build(backbone, mechanism)
    except ValueError as error:
        match = REASON.fullmatch(str(error))
        return match[1] if match else str(error)
    return None


def support_table() -> str:
    """Return the table in Markdown: one row per backbone, one column per mechanism, numbered reasons below."""
    reasons: list[str] = []
    rows: dict[tuple[str, ...], list[str]] = {}
    for backbone in backbones():
        cells = []
        for mechanism in crosshead.MECHANISMS:
            reason = refusal(backbone, mechanism)
            if reason is not None and reason not in reasons:
                reasons.append(reason)
            cells.append("yes" if reason is None else f"no ({reasons.index(reason) + 1})")
        rows.setdefault(tuple(cells), []).append(backbone)
    lines = [f"| | {' | '.join(f'`{name}`' for name in crosshead.MECHANISMS)} |", "| --- |" + " --- |" * len(cells)]
    lines += [f"| {', '.join(names)} | {' | '.join(row)} |" for row, names in rows.items()]
    return "\n".join([*lines, "", *(f"{number}. {reason}" for number, reason in enumerate(reasons, start=1))]) + "\n"
