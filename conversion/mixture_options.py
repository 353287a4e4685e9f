"""Options of `mixture` in a conversion: defaults for a pretrained model, and limits of a fitted router."""

from collections.abc import Mapping
from typing import Any

from crosshead.common.errors import ConversionError
from crosshead.modeling.options import is_whole


def mixture_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with defaults: a fitted two_stage router, or the paper's method if an option implies it."""
    is_paper = options.get("method") == "paper" or "shared" in options or options.get("router") == "query_norm"
    router = {"router": "query_norm"} if is_paper else {"router": "two_stage", "shared_heads": 0}
    return {"method": "paper" if is_paper else "calibrated", "gate": "binary"} | router | dict(options)


def check_fitted_router(mixers: Mapping[str, Mapping[str, Any]], choices: Mapping[str, Mapping[str, str]]) -> None:
    """Raise `ConversionError` if the options of `mixture` are incompatible with a fitted router."""
    if choices.get("mixture", {}).get("method") != "calibrated":
        return
    for option, value in (("router", "two_stage"), ("gate", "binary")):
        if mixers["mixture"][option] != value:
            raise ConversionError(
                f"mixers.mixture.{option}={mixers['mixture'][option]!r} does not go together with "
                f"method='calibrated', which fits router='two_stage' with gate='binary': use method=paper"
            )
    if "differential" in mixers:
        raise ConversionError(
            "mixers.mixture.method='calibrated' does not go together with 'differential', which pairs heads: use "
            "method=paper and router=two_stage"
        )


def share_half(options: dict[str, Any], heads: int) -> None:
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
