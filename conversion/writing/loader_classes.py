"""Names the class of the tokenizer or the image processor in the files of a converted model.

transformers chooses a class that the files do not name by the model type, and knows the stock types only. The files of
published BERT and ViT checkpoints name none.
"""

import json
from pathlib import Path
from typing import Any

from crosshead.common.errors import ConversionError
from crosshead.common.images import open_processor

from ..architectures.families import FAMILIES, PREFIX
from ..calibration.text import load_tokenizer
from ..sources.model_folder import IMAGE_PROCESSOR, write_json
from ..sources.resolve import Source

TOKENIZER = "tokenizer_config.json"
GENERIC = {"TokenizersBackend", "PythonBackend", "PreTrainedTokenizer"}
"""Classes, without the suffix "Fast", that transformers uses for an unknown model type too."""


def load_processor(source: Source) -> Any:
    """Return the source's tokenizer, or its image processor; None if it has none that loads."""
    if not source.files:
        return None
    folder = source.files[0].parent
    try:
        if not _reads_images(source):
            return load_tokenizer(source)
        return open_processor(folder, f"in {folder.name}") if (folder / IMAGE_PROCESSOR).is_file() else None
    except ConversionError:
        return None


def write_loader_class(source: Source, folder: Path) -> None:
    """Write the class with which the source's tokenizer or image processor loads, if transformers needs it."""
    path = folder / (IMAGE_PROCESSOR if _reads_images(source) else TOKENIZER)
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if content.keys() & {"image_processor_type", "feature_extractor_type"} or not (loaded := load_processor(source)):
        return
    if _reads_images(source):
        write_json(path, content | {"image_processor_type": loaded.to_dict()["image_processor_type"]})
        return
    declared = content.get("tokenizer_class") or source.config.get("tokenizer_class") or ""
    if type(loaded).__name__.removesuffix("Fast") not in GENERIC | {declared.removesuffix("Fast")}:
        write_json(path, content | {"tokenizer_class": type(loaded).__name__})


def _reads_images(source: Source) -> bool:
    return FAMILIES[source.config["model_type"].removeprefix(PREFIX)].reads_images
