"""Some of the Hub's rules for the metadata (YAML front matter) of a model card."""

import re
from collections.abc import Iterator

import yaml

KINDS = {"license": str, "library_name": str, "pipeline_tag": str, "tags": list, "base_model": (str, list)}
"""Types that the Hub accepts, per metadata field."""


def faults(content: str) -> Iterator[str]:
    """Yield the error messages of the Hub for a card's metadata: wrong types, invalid names in the results."""
    metadata = yaml.safe_load(content.split("---\n")[1]) if content.startswith("---\n") else None
    if not isinstance(metadata, dict):
        yield "no metadata"
        return
    for key, kind in KINDS.items():
        if key in metadata and not isinstance(metadata[key], kind):
            yield f'"{key}" must be {kind}'
    for model in metadata.get("model-index", ()):
        if not model.get("name"):
            yield '"model-index[0].name" is required'
        for result in model["results"]:
            if not re.fullmatch(r"(?:[\w-]+/)?[\w.-]+", result["dataset"]["type"]):
                yield f'"dataset.type" with value "{result["dataset"]["type"]}" fails to match the required pattern'
            if not all("type" in metric and "value" in metric for metric in result["metrics"]):
                yield '"metrics" need type and value'
