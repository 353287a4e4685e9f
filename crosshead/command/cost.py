"""`crosshead cost`: counts parameters, FLOPs and KV cache of a model."""

from pathlib import Path
from typing import Annotated, Any

import typer

PREFIX = "crosshead_"
"""Prefix of the model types of crosshead."""


def cost(
    model: Annotated[
        str,
        typer.Argument(help="Model directory, Hub id, config.json or GGUF file, stock or crosshead."),
    ],
    mixer: Annotated[
        list[str] | None,
        typer.Option(help="Mechanism instead of the model's own: NAME[:key=value,...] as in `convert`. Repeatable."),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            help="Number of tokens, for T5 of source and target each. Default: 4096, or the context of the model if "
            "that is shorter; for an image or latent its number of tokens."
        ),
    ] = None,
    image_size: Annotated[
        int | None,
        typer.Option(help="Height and width of the image, for DINOv2 and TransNeXt. Default: that of the config."),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Count parameters, FLOPs and KV cache of a model.

    Reads only the config, so it is fast for any model size. For example:

    crosshead cost Qwen/Qwen3-0.6B --mixer explicit:key_heads=50%,value_heads=50% --length 8192
    """
    import json

    from crosshead.evals.cost.model import usual_length
    from crosshead.evals.cost.report import cost_lines, cost_report

    config = _config(model, mixer or [], revision)
    length = usual_length(config, image_size=image_size) if length is None else length
    report = {"model": model} | cost_report(config, length, image_size)
    print(json.dumps(report, indent=2) if as_json else "\n".join(cost_lines(report)))


def _config(model: str, mixer: list[str], revision: str | None) -> Any:
    """The config of the model; with --mixer, as `convert` would write it for these mechanisms."""
    from crosshead.conversion.architectures.families import FAMILIES, kind_of
    from crosshead.conversion.architectures.saved_config import config_class_of, saved_config
    from crosshead.conversion.compress.initial_weights import doubled_heads
    from crosshead.conversion.mixers import read_mixers, read_request
    from crosshead.conversion.options import with_recipe

    content = _content(model, revision)
    requested, _ = with_recipe(None, mixer, {}) if mixer else ({}, None)
    if "_class_name" in content:
        return _dit_config(content, requested, model)
    config_class, kind = config_class_of(content, model), kind_of(content)
    family, config = FAMILIES.get(config_class.model_type.removeprefix(PREFIX)), saved_config(content, model)
    if kind == "crosshead" and not mixer:
        return config
    plain = config_class.from_dict({**content, "mixers": {}})
    mixers = (read_request(requested, plain) if family else read_mixers(requested, plain.layouts())).mixers
    doubled = doubled_heads(mixers, config) if kind == "stock" and family and not family.is_encoder else {}
    return config_class.from_dict({**content, "mixers": mixers, **doubled})


def _dit_config(content: dict[str, Any], requested: Any, name: str) -> Any:
    """The config of a DiT; the mechanisms of --mixer, if any, replace its own."""
    from crosshead.conversion.mixers import read_mixers
    from crosshead.evals.cost.dit_config import DiTConfig

    config = DiTConfig.read(content, name)
    if not requested:
        return config
    return config.with_mixers(read_mixers(requested, config.on_meta().layouts()).mixers)


def _content(model: str, revision: str | None) -> dict[str, Any]:
    """The content of config.json, or the equivalent from the metadata of a GGUF file."""
    from crosshead.common.checked_json import parse_object
    from crosshead.common.model_location import expand_home, split_revision
    from crosshead.conversion.gguf.store import GgufStore
    from crosshead.conversion.sources.model_folder import CONFIG

    path = expand_home(model)
    if path.exists() and revision is not None:
        raise ValueError(f"--revision {revision!r} needs a model on the Hub, and {model} is local")
    if path.suffix.lower() == ".gguf":
        return GgufStore(path).config
    if path.is_dir():
        path /= CONFIG
    elif not path.is_file():
        path = _from_hub(*(split_revision(model) if revision is None else (model, revision)))
    try:
        return parse_object(path.read_bytes(), str(path))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def _from_hub(model: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError

    from crosshead.conversion.sources.model_folder import CONFIG

    try:
        return Path(hf_hub_download(model, CONFIG, revision=revision))
    except HFValidationError as error:
        raise ValueError(
            f"{model!r} does not exist: give a model directory, a {CONFIG}, a GGUF file or a Hub id"
        ) from error
    except Exception as error:  # the HTTP library's own errors differ between versions of the Hub's client
        raise ValueError(
            f"{model!r} is not a local file, and its {CONFIG} cannot be downloaded from the Hub "
            f"({type(error).__name__}): check the name, the revision and the connection"
        ) from error
