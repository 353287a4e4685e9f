"""The table of mechanisms."""

from .base import Mechanism, Rules
from .bilinear import Bilinear
from .differential import Differential
from .explicit import Explicit
from .gating import Gating
from .knocking import Knocking
from .mixture import Mixture
from .talking import Talking

MECHANISMS: dict[str, type[Mechanism]] = {
    "knocking": Knocking,
    "explicit": Explicit,
    "mixture": Mixture,
    "talking": Talking,
    "differential": Differential,
    "gating": Gating,
    "bilinear": Bilinear,
}
"""Name in a config's `mixers` -> mechanism."""
RULES: dict[str, type[Rules]] = {name: mechanism.rules for name, mechanism in MECHANISMS.items()}
"""Name in a config's `mixers` -> rules for the mechanism's options."""
