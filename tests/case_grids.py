"""Parametrisations by `case`, or by `case` and `backbone`, that mark most of the toys' cases as slow."""

import pytest

from tiers import grid
from toys import BACKBONES, CASES, COMPOSITIONS, ENCODER_CASES, ENCODERS, SHARED_ROTARY, SHARED_ROTARY_CASES


def _tier(default: bool) -> list[pytest.MarkDecorator]:
    return [] if default else [pytest.mark.slow]


for_each_case_and_backbone = pytest.mark.parametrize(("case", "backbone"), grid(CASES, BACKBONES, strength=1))
"""Default tier: each case on one backbone, each backbone at least once."""

_ON_SHARED_ROTARY = grid(SHARED_ROTARY_CASES, SHARED_ROTARY, strength=1)
for_each_case_and_shared_rotary = pytest.mark.parametrize(("case", "backbone"), _ON_SHARED_ROTARY)
for_each_case_and_decoder = pytest.mark.parametrize(
    ("case", "backbone"), [*grid(CASES, BACKBONES, strength=1), *_ON_SHARED_ROTARY]
)
"""All decoders, including those with shared rotary keys (see `toys.mixers_of`). Default tier: each case once."""

_ON_ENCODERS = grid(ENCODER_CASES, ENCODERS, strength=1)
for_each_case_and_encoder = pytest.mark.parametrize(("case", "backbone"), _ON_ENCODERS)
for_each_case_and_model = pytest.mark.parametrize(
    ("case", "backbone"), [*grid(CASES, BACKBONES, strength=1), *_ON_SHARED_ROTARY, *_ON_ENCODERS]
)
"""All decoders and encoders (see `toys.mixers_of`). Default tier: each case of each group of backbones once."""

_BACKBONE_OF = dict(zip(COMPOSITIONS, BACKBONES, strict=False))

_EACH_MECHANISM = [
    pytest.param(case, backbone, marks=_tier(_BACKBONE_OF.get(case, backbone) == backbone))
    for case in CASES
    for backbone in BACKBONES
]
for_each_mechanism_on_each_backbone = pytest.mark.parametrize(("case", "backbone"), _EACH_MECHANISM)
for_each_mechanism_on_each_decoder = pytest.mark.parametrize(
    ("case", "backbone"), [*_EACH_MECHANISM, *_ON_SHARED_ROTARY]
)
for_each_mechanism_on_each_model = pytest.mark.parametrize(
    ("case", "backbone"), [*_EACH_MECHANISM, *_ON_SHARED_ROTARY, *_ON_ENCODERS]
)
"""Default tier: each mechanism on each backbone, each composition on one backbone."""

for_compositions = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=_tier(case in COMPOSITIONS)) for case in CASES]
)
"""Default tier: the compositions, which together use every mechanism. Slow tier: also each single mechanism."""

for_one_case = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=_tier(case == "knocking+mixture")) for case in CASES]
)
"""Default tier: one composition, for behaviour that hardly depends on the mechanism."""
