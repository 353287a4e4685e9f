"""Choice of the `StreamedModel` class for a config."""

from typing import Any

from ..architectures.families import family_of
from ..sources.tensor_store import TensorStore
from .streamed_encoder import StreamedEncoder, StreamedImages
from .streamed_model import StreamedModel
from .streamed_t5 import StreamedT5


def stream(store: TensorStore, config: Any, *arguments: Any, **options: Any) -> StreamedModel:
    """Return the model of a config, which runs layer by layer."""
    family = family_of(config)
    encoder = StreamedT5 if family.stacks else StreamedImages if family.reads_images else StreamedEncoder
    return (encoder if family.is_encoder else StreamedModel)(store, config, *arguments, **options)
