"""Which mechanism works with its defaults on which backbone: every pair is tried with a tiny configuration."""

import re
from typing import Any

import crosshead
import toys
import transnext_toys
from image_toys import IMAGE_BACKBONES

DIT = "DiT"
ACTIVE = {"mixture": {"active_heads": 2}}
"""Options without a default; toys have four heads, two in the first stage of TransNeXt."""
REASON = re.compile(r"mixers(?:\.\w+)*=.* is not allowed: ([^;]*?)(?:; DiT takes .*| \(layer 0\))?")
"""A refusal, without the value, the layer and the accepted ones."""


def backbones() -> list[str]:
    """All, by the names of their classes."""
    return [*(config.class_prefix.removeprefix("Crosshead") for config in crosshead.FAMILIES), DIT]


def build(backbone: str, mechanism: str) -> Any:
    """A tiny model, or for other backbones than DiT its configuration; `ValueError` if the pair is refused."""
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
    """The reason why a pair is refused, or None."""
    try:
        build(backbone, mechanism)
    except ValueError as error:
        found = REASON.fullmatch(str(error))
        return found[1] if found else str(error)
    return None


def support_table() -> str:
    """Backbones down, mechanisms across; a number stands for one of the reasons below."""
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
