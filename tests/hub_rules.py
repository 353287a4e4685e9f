"""Some of the Hub's rules for the head of a card."""

import re
from collections.abc import Iterator

import yaml

KINDS = {"license": str, "library_name": str, "pipeline_tag": str, "tags": list, "base_model": (str, list)}
"""What the Hub takes in the head of a card."""


def faults(content: str) -> Iterator[str]:
    """What the Hub would say of a card's head: kinds of values, and names in results."""
    head = yaml.safe_load(content.split("---\n")[1]) if content.startswith("---\n") else None
    if not isinstance(head, dict):
        yield "no metadata"
        return
    for key, kind in KINDS.items():
        if key in head and not isinstance(head[key], kind):
            yield f'"{key}" must be {kind}'
    for model in head.get("model-index", ()):
        if not model.get("name"):
            yield '"model-index[0].name" is required'
        for result in model["results"]:
            if not re.fullmatch(r"(?:[\w-]+/)?[\w.-]+", result["dataset"]["type"]):
                yield f'"dataset.type" with value "{result["dataset"]["type"]}" fails to match the required pattern'
            if not all("type" in metric and "value" in metric for metric in result["metrics"]):
                yield '"metrics" need type and value'
