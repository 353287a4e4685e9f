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
    """What is to be chosen."""

    budget: float

    def check(self, request: MixerRequest) -> None:
        """`ConversionError` where there is nothing to choose, or somebody has chosen already."""
        explicit = request.mixers.get("explicit")
        if explicit is None:
            raise ConversionError("--layers auto chooses component heads of 'explicit': add --mixer explicit")
        for option in CHOSEN:
            if option in explicit:
                raise ConversionError(f"--layers auto chooses mixers.explicit.{option}: leave one of the two out")

    def resolve(
        self,
        source: Source,
        stock: Any,
        target: Any,
        request: MixerRequest,
        text: Text,
        calibration: Calibration | None,
        kept: Path,
        progress: Progress,
    ) -> tuple[MixerRequest, dict[str, Any]]:
        """The request with counts and layers, and what was measured: now, or by a run before this, which kept it."""
        if not kept.exists():
            write_json(kept, self._measured(source, stock, target, request, text, calibration, progress))
        found = json.loads(kept.read_bytes())
        counts = {side: found[side] for side in ("key_heads", "value_heads")}
        layers = {"layers": Choice(**counts).layers(stock.num_key_value_heads)}
        mixers = request.mixers | {"explicit": request.mixers["explicit"] | counts | layers}
        return replace(request, mixers=mixers), found

    def _measured(
        self,
        source: Source,
        stock: Any,
        target: Any,
        request: MixerRequest,
        text: Text,
        calibration: Calibration | None,
        progress: Progress,
    ) -> dict[str, Any]:
        tokens = text.windows(source, TRIAL_LENGTH, TRIALS, stock.vocab_size)
        losses = measure_losses(
            StreamedModel(source.store, stock),
            source.store,
            target.layouts(),
            calibration,
            request.choices["explicit"]["method"],
            tokens,
            lambda *done: progress("choosing", *done),
        )
        return {"text": text.read_as} | describe(losses, choose(losses, target.layouts(), self.budget))
