"""`--layers auto`: component heads of every layer from measured losses and a budget."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .calibrating import Text
from .calibration import Calibration
from .errors import ConversionError
from .job import Progress
from .layer_choice import TRIAL_LENGTH, TRIALS, Choice, choose, describe, measure_losses
from .mixer_options import MixerRequest
from .published_folder import write_json
from .sources import Source
from .streamed_model import StreamedModel

CHOSEN = ("key_heads", "value_heads", "layers", "on")
"""Options of `explicit` that are not asked for but chosen."""


@dataclass(frozen=True)
class AutoLayers:
    """What is to be chosen, of what, and on which text."""

    budget: float
    source: Source
    stock: Any
    """The source's configuration."""
    target: Any
    """The configuration of the result, before anything is chosen."""
    request: MixerRequest
    text: Text

    def check(self) -> None:
        """`ConversionError` where there is nothing to choose, or somebody has chosen already."""
        explicit = self.request.mixers.get("explicit")
        if explicit is None:
            raise ConversionError("--layers auto chooses component heads of 'explicit': add --mixer explicit")
        for option in CHOSEN:
            if option in explicit:
                raise ConversionError(f"--layers auto chooses mixers.explicit.{option}: leave one of the two out")

    def resolve(
        self, calibration: Calibration | None, kept: Path, progress: Progress
    ) -> tuple[MixerRequest, dict[str, Any]]:
        """The request with counts and layers, and what was measured: now, or by a run before this, which kept it."""
        if not kept.exists():
            write_json(kept, self._measured(calibration, progress))
        found = json.loads(kept.read_bytes())
        counts = {side: found[side] for side in ("key_heads", "value_heads")}
        layers = {"layers": Choice(**counts).layers(self.stock.num_key_value_heads)}
        mixers = self.request.mixers | {"explicit": self.request.mixers["explicit"] | counts | layers}
        return replace(self.request, mixers=mixers), found

    def _measured(self, calibration: Calibration | None, progress: Progress) -> dict[str, Any]:
        tokens = self.text.windows(self.source, TRIAL_LENGTH, TRIALS, self.stock.vocab_size)
        losses = measure_losses(
            StreamedModel(self.source.store, self.stock),
            self.source.store,
            self.target.layouts(),
            calibration,
            self.request.choices["explicit"]["method"],
            tokens,
            lambda *done: progress("choosing", *done),
        )
        read = {"text": self.text.read_as, "sha256": self.text.digest_read()}
        return read | describe(losses, choose(losses, self.target.layouts(), self.budget))
