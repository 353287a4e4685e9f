"""Converts texts and images to the inputs of a model, and to their part of the report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from crosshead.common.errors import EvalError
from crosshead.common.images import model_image, open_processor, reads_any_size

from ..open_model import Opened, check_tokens
from .backbones import DIT, IMAGE, TARGET, TEXT, Backbone, patch_grid
from .diffusion import TIME, image_reader
from .pack import pack_picture

MAXIMUM_TOKENS = 512
"""Maximum number of tokens of an input: a page stores and draws maps with the square of this many weights."""
ImageReader = Callable[[Path], tuple[dict[str, torch.Tensor], torch.Tensor]]
"""Function of an image file: the model's arguments, of which the first is the image, and the colours (height, width,
channels) from 0 to 1."""


@dataclass(frozen=True)
class Inputs:
    """The texts and images of a report. The fields are named like the options of the command."""

    text: Mapping[str, str] = field(default_factory=dict)
    """Name -> text."""
    target: Sequence[str] = ()
    """Text of the decoder for each text, for a model with encoder and decoder."""
    image: Mapping[str, Path] = field(default_factory=dict)
    """Name -> image file."""
    time: int | None = None
    """Timestep of the noise that is added to images, for a diffusion transformer."""


@dataclass(frozen=True)
class Sample:
    """One text, text with target, or image, as the input of one model."""

    arguments: dict[str, torch.Tensor]
    """Arguments of the model's forward pass."""
    record: dict[str, Any]
    """The sample's part of the report, without the layers."""
    positions: dict[str, torch.Tensor]
    """Kind of input -> positions of its tokens: (T, 1) in a text; (T, 2) in an image, nan for special tokens."""


def read_samples(opened: Opened, backbone: Backbone, inputs: Inputs) -> list[Sample]:
    """Read the inputs of a model; `EvalError` for an option that is missing or unused, or for an unreadable file."""
    check_options(opened, backbone, inputs)
    if IMAGE in backbone.reads:
        time = TIME if inputs.time is None else inputs.time
        read, is_dit = _image_reader(opened, time), opened.config.model_type == DIT
        names = [f"{name} at time {time}" if is_dit else name for name in inputs.image]
        files = inputs.image.values()
        return [_image_sample(opened, backbone, read, *image) for image in zip(names, files, strict=True)]
    targets: Sequence[str | None] = inputs.target or [None] * len(inputs.text)
    return [_text_sample(opened, *text, target) for text, target in zip(inputs.text.items(), targets, strict=True)]


def check_options(opened: Opened, backbone: Backbone, inputs: Inputs) -> None:
    """Raise `EvalError` unless the options are exactly those that the model needs."""
    needed = " and ".join(f"--{name}" for name in backbone.reads)
    for name in (TEXT, TARGET, IMAGE):
        is_given = bool(getattr(inputs, name))
        if is_given != (name in backbone.reads):
            problem = f"has no use for --{name}" if is_given else f"needs --{name}"
            reads = f"a model with model_type={opened.config.model_type!r} reads {needed}"
            raise EvalError(f"{opened.label} {problem}: {reads}")
    if inputs.time is not None and opened.config.model_type != DIT:
        raise EvalError(f"{opened.label} has no use for --time, which is for diffusion transformers")
    if inputs.target and len(inputs.target) != len(inputs.text):
        counts = f"{len(inputs.text)} --text and {len(inputs.target)} --target"
        raise EvalError(f"{counts} were given: give one --target for each --text, in the same order")


def _text_sample(opened: Opened, name: str, text: str, target: str | None) -> Sample:
    ids, sequence = read_text(opened, name, text)
    arguments, tokens = {"input_ids": ids}, {TEXT: ids.shape[1]}
    record = {"name": name, **sequence, "target": None, "image": None}
    if target is not None:
        start = getattr(opened.config, "decoder_start_token_id", None)
        if start is None:
            raise EvalError(f"{opened.label} has no decoder_start_token_id in its config.json: add it")
        ids, record["target"] = read_text(opened, f"target of {name}", target, start)
        arguments["decoder_input_ids"], tokens[TARGET] = ids, ids.shape[1]
    positions = {kind: torch.arange(float(count)).unsqueeze(1) for kind, count in tokens.items()}
    return Sample(arguments, record, positions)


def read_text(opened: Opened, name: str, text: str, start: int | None = None) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the token ids of a text (1, T), and its part of the report; `EvalError` for no tokens, or too many.

    A decoder's text begins with the token `start` and has no other special tokens, as in training.
    """
    if not text.strip():
        raise EvalError(f"the text {name!r} is empty")
    if not opened.tokenizer.is_fast:
        kind = f"{opened.label} has a {type(opened.tokenizer).__name__}"
        raise EvalError(f"{kind}, which gives no positions of tokens in a text: inspect needs a fast tokenizer")
    first = [] if start is None else [start]
    encoded = opened.tokenizer(text, return_offsets_mapping=True, verbose=False, add_special_tokens=start is None)
    ids, spans = first + encoded["input_ids"], [(0, 0)] * len(first) + encoded["offset_mapping"]
    context = getattr(opened.config, "max_position_embeddings", MAXIMUM_TOKENS)
    limit = min(context, MAXIMUM_TOKENS)
    if len(spans) > limit:
        reason = f"{opened.label} takes" if context < MAXIMUM_TOKENS else "a page holds"
        special = len(list(takewhile(lambda span: span[0] == span[1], reversed(spans))))  # at the end of the text
        raise EvalError(
            f"the text {name!r} has {len(spans):,} tokens, and {reason} at most {limit}: use its first "
            f"{max(stop for _, stop in spans[: limit - special]):,} characters"
        )
    check_tokens(ids, opened.config.vocab_size, f"the tokenizer of {opened.label}")
    pieces, starts = split_text(text, spans, opened.tokenizer.convert_ids_to_tokens(ids))
    return torch.tensor([ids]), {"tokens": pieces, "starts": starts}


def split_text(text: str, spans: Sequence[tuple[int, int]], names: Sequence[str]) -> tuple[list[str], list[int]]:
    """Return the text of each token, with the space before it, and its start; a special token has its name as text.

    If several tokens encode one character, the first token has the character and the others are empty.
    """
    pieces, starts, end = [], [], 0
    for (start, stop), name in zip(spans, names, strict=True):
        pieces.append(name if start == stop else text[end:stop])
        starts.append(end)
        end = max(end, stop)
    return pieces, starts


def _image_reader(opened: Opened, time: int) -> ImageReader:
    if opened.config.model_type == DIT:
        return image_reader(opened, time)
    place = f"in {opened.label}"
    processor = open_processor(opened.name, place)

    def read(file: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        pixels = model_image(file, processor, opened.config, place)
        return {"pixel_values": pixels}, _colours(pixels[0], processor)

    return read


def _image_sample(opened: Opened, backbone: Backbone, read: ImageReader, name: str, file: Path) -> Sample:
    config, special = opened.config, len(backbone.special_tokens)
    arguments, colours = read(file)
    rows, columns = patch_grid(config, *next(iter(arguments.values())).shape[2:])
    patches = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    tokens = [*backbone.special_tokens, *(f"patch ({row}, {column})" for row, column in patches.tolist())]
    if len(tokens) > MAXIMUM_TOKENS:
        advice = "set a smaller size in its preprocessor_config.json"
        if not reads_any_size(config):
            advice = (
                f"use a model with larger patches than patch_size={config.patch_size}, or smaller images than "
                f"image_size={config.image_size}"
            )
        raise EvalError(
            f"{opened.label} makes {len(tokens)} tokens of an image, and a page holds at most {MAXIMUM_TOKENS}: "
            f"{advice}"
        )
    positions = torch.cat([torch.full((special, 2), torch.nan), patches.float()])
    image = {"rows": rows, "columns": columns, "special": special, "picture": pack_picture(colours)}
    record = {"name": name, "tokens": tokens, "starts": list(range(len(tokens))), "target": None, "image": image}
    return Sample(arguments, record, {IMAGE: positions})


def _colours(pixels: torch.Tensor, processor: Any) -> torch.Tensor:
    """Return the colours (height, width, channels) from 0 to 1 of a model's pixel values (channels, height, width)."""
    if getattr(processor, "do_normalize", False):
        mean, deviation = (torch.tensor(each).view(-1, 1, 1) for each in (processor.image_mean, processor.image_std))
        pixels = pixels * deviation + mean
    return pixels.clamp(0, 1).permute(1, 2, 0)
