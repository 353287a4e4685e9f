"""The table of mechanisms."""

from .differential import Differential
from .explicit import Explicit
from .knocking import Knocking
from .mixer import Mixer
from .mixture import Mixture
from .talking import Talking

MECHANISMS: dict[str, type[Mixer]] = {
    "knocking": Knocking,
    "explicit": Explicit,
    "mixture": Mixture,
    "talking": Talking,
    "differential": Differential,
}
"""The name in a config's `mixers` -> the mechanism."""
