"""Compares a model with its source: tensors, logits, cache size, and loading without crosshead."""

import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import torch

from crosshead.common.errors import ConversionError
from crosshead.common.progress import Progress, silent

from ..architectures.families import FAMILIES, PREFIX, kind_of, read_config, stock_shapes
from ..architectures.mixer_tensors import mixed_shapes
from ..calibration.streamed_model import StreamedModel
from ..calibration.text import DEFAULT_NAME, HELD_OUT, default_text, load_tokenizer, read_text, windows
from ..plan import check_source
from ..sources.model_folder import (
    RECORD,
    Advance,
    foreign_code,
    read_record,
    record_file,
    store_digest,
    stored_digests,
    write_json,
)
from ..sources.resolve import Source, open_source
from ..sources.safetensors_store import SafetensorsStore
from ..sources.tensor_store import DTYPES, Entry
from .logit_diff import compare
from .reload import NEW_TOKENS, agreement, reload_check
from .reload_worker import continue_greedily
from .tolerances import Tolerance, cache_bytes

LENGTH, WINDOWS = 256, 4


@dataclass(frozen=True)
class Sample:
    """Windows of tokens, and what they are of."""

    tokens: torch.Tensor
    """(B, T)"""
    text: str
    """How the record names the text."""


def read_sample(source: Source, text: Path | None) -> Sample:
    """A file's text, or of the default text the part that calibration does not read."""
    prose = _held_out() if text is None else read_text(text)
    config = read_config(source.config, kind_of(source.config), source.origin["name"])
    tokens = windows(load_tokenizer(source), prose, LENGTH, WINDOWS, config.vocab_size)
    return Sample(tokens, DEFAULT_NAME if text is None else text.name)


def _held_out() -> str:
    text = default_text()
    return text[int(len(text) * HELD_OUT) :]


PROMPT_LENGTH, PROMPTS = 32, 3
RELOADED = 1e-5
"""How far logits may be from those of the same weights in this process, as a part of the greatest."""
JUDGED = ("greatest_logit_difference", "largest_logit", "kl_divergence")
FAULTS = ("missing", "unexpected", "mismatched", "errors", "unloaded")


def verify(
    source: str | Path,
    model: str | Path,
    *,
    revision: str | None = None,
    text: str | Path | None = None,
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Compare a model with its source; the report also goes to the record of its conversion, where there is one.

    Loading it in a clean process runs the code in its folder: code that is not this crosshead's own runs only with
    `trust_remote_code`.

    `ConversionError` where the two ought to be equal and are not: after a neutral conversion, or a fold, as long as
    nothing was trained since.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch, "source"), Path(scratch, "model")]
        for folder in folders:
            folder.mkdir()
        origin = open_source(source, revision, scratch=folders[0])
        made = open_source(model, scratch=folders[1], also=["*.py", RECORD])
        if not trust_remote_code:
            refuse_foreign_code(made)
        sample = read_sample(origin, None if text is None else Path(text))
        kept = folder_of(made)
        place = None if kept is None else record_file(kept, kind_of(made.config) == "stock")
        record = {} if place is None else read_record(place)
        advance = checking(progress, [origin, made])
        if record and record["source"]["digest"] != store_digest(origin.store, {}, advance):
            raise ConversionError(
                f"{model} was made from {record['source']['name']!r}; {source} has other weights: give its own source"
            )
        allowed = record["tolerance"] if record and is_as_written(made, record, advance) else None
        tolerance = None if allowed is None else Tolerance(**allowed)
        measured = measure(origin, made, sample, tolerance, progress)
        if place is not None and record and made.origin["kind"] == "folder":
            with suppress(OSError):  # a published folder may be read-only
                write_json(place, record | {"verification": measured})
        check_equal(measured, tolerance)
        return {"verification": measured}


Verify = Callable[[Path, Tolerance | None, Progress], dict[str, Any]]
"""Compares a finished folder with a source; `ConversionError` where it differs by more than the tolerance."""


def verifier(source: Source) -> Verify:
    """The verification of a conversion before its folder is published; a bad tokenizer is an error at once."""
    sample = read_sample(source, None)

    def verify_model(folder: Path, tolerance: Tolerance | None, progress: Progress) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as scratch:
            made = open_source(folder, scratch=Path(scratch))
            measured = measure(source, made, sample, tolerance, progress)
        check_equal(measured, tolerance)
        return measured

    return verify_model


def checking(progress: Progress, checkpoints: list[Source]) -> Advance:
    """What is to be told the bytes of every tensor that was read, of all in some checkpoints."""
    total = sum(entry.size for checkpoint in checkpoints for entry in checkpoint.store.entries.values())
    done = [0]

    def advance(size: int) -> None:
        done[0] += size
        progress("checking", done[0], total)

    return advance


def measure(
    source: Source, model: Source, sample: Sample, tolerance: Tolerance | None, progress: Progress
) -> dict[str, Any]:
    """What there is to say of a model and its source, without judging it."""
    (before, _), (after, tensors) = checked(source), checked(model)
    attention = "eager" if needs_weights(before) or needs_weights(after) else "sdpa"
    streamed = (
        StreamedModel(source.store, before, attn_implementation=attention),
        StreamedModel(model.store, after, attn_implementation=attention),
    )
    compared = compare(*streamed, sample.tokens, lambda *done: progress("comparing", *done))
    return {
        "must_equal": tolerance is not None,
        "tensors": tensors,
        "sample": {"text": sample.text},
        **asdict(compared),
        "kv_bytes_per_token_before": cache_of(before, source.store.entries),
        "kv_bytes_per_token_after": cache_of(after, model.store.entries),
        "reload": reloaded(streamed[0], model, after, sample.tokens[:PROMPTS, :PROMPT_LENGTH]),
    }


def needs_weights(config: Any) -> bool:
    """Whether a mechanism replaces the backend's attention, and so agrees to the bit on the eager one alone."""
    return "talking" in getattr(config, "mixers", ())


def folder_of(checkpoint: Source) -> Path | None:
    """Where the checkpoint lies; None where it is no folder of safetensors."""
    return checkpoint.store.folder if isinstance(checkpoint.store, SafetensorsStore) else None


def refuse_foreign_code(model: Source) -> None:
    """`ConversionError` where verification would run code that somebody else may have written."""
    folder = folder_of(model)
    file = None if folder is None or "auto_map" not in model.config else foreign_code(folder)
    if file is not None:
        raise ConversionError(
            f"{model.origin['name']} brings code that is not this crosshead's own ({file}), and verification would "
            "run it: look at it, then say --trust-remote-code"
        )


def checked(checkpoint: Source) -> tuple[Any, dict[str, int]]:
    """The configuration of a checkpoint whose tensors are all there, and no others; and the account of them."""
    kind = kind_of(checkpoint.config)
    config = read_config(checkpoint.config, kind, checkpoint.origin["name"])
    shapes, stored = stock_shapes(config), checkpoint.store.entries.keys()
    shapes = mixed_shapes(config, shapes) if kind == "mixed" else shapes
    redundant = check_source(checkpoint.store, shapes, config.tie_word_embeddings)
    buffers = {name for name, entry in checkpoint.store.entries.items() if entry.is_integer}
    missing, unexpected = shapes.keys() - stored, stored - shapes.keys() - redundant.keys() - buffers
    return config, {"expected": len(shapes), "missing": len(missing), "unexpected": len(unexpected)}


def cache_of(config: Any, entries: Mapping[str, Entry]) -> int:
    """Bytes of cache for each token, in the dtype of the weights."""
    stored = next(entry.dtype for name, entry in entries.items() if name.endswith("k_proj.weight"))
    family = FAMILIES[config.model_type.removeprefix(PREFIX)]
    mixed = config if hasattr(config, "mixers") else family.mixed.from_dict(config.to_dict() | {"mixers": {}})
    return cache_bytes(mixed, DTYPES[stored])


def reloaded(source: StreamedModel, model: Source, config: Any, prompts: torch.Tensor) -> dict[str, Any]:
    """Whether the folder loads where crosshead is not installed, as the same model, and says what the source says."""
    folder = folder_of(model)
    if folder is None:
        raise ConversionError(f"{model.origin['name']} is not a folder of safetensors, so no result of a conversion")
    # On the attention that loading chooses; a model too large to be loaded whole need not run once more.
    expected = cache(lambda: final_logits(StreamedModel(model.store, config), prompts))
    found = reload_check(folder, prompts, expected)
    faults = {kind: found.pop(kind) for kind in FAULTS if kind in found}  # names and shapes alone tell fewer
    for kind, names in faults.items():
        if names:
            raise ConversionError(f"{model.origin['name']} does not load whole elsewhere: {kind} {names[0]}")
    found["tensors"] = {kind: len(names) for kind, names in faults.items()}
    worst = found.get("greatest_logit_difference", 0.0)
    largest = float(expected().abs().max()) if worst else 0.0
    if not worst <= RELOADED * largest:
        raise ConversionError(
            f"{model.origin['name']} is another model where it is loaded elsewhere: logits differ by up to "
            f"{worst:.3g}, the greatest being {largest:.3g}; please report this"
        )
    continuations, texts = found.pop("continuations", None), found.pop("texts", None)
    if continuations is not None and texts is not None:
        with source.whole() as whole:
            found["greedy_text_agreement"] = agreement(continue_greedily(whole, prompts, NEW_TOKENS), continuations)
        found["greedy_text"] = texts[0]
    return found


@torch.no_grad()
def final_logits(model: StreamedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Logits (B, T, vocabulary)."""
    with model.head() as head:
        return head(model.run(tokens))


def is_as_written(model: Source, record: Mapping[str, Any], advance: Advance) -> bool:
    """Whether every tensor still is what the conversion wrote."""
    written = {name: tensor["crc32"] for name, tensor in record["tensors"].items()}
    return written == stored_digests(model.store, {}, advance)


def check_equal(measured: Mapping[str, Any], tolerance: Tolerance | None) -> None:
    """`ConversionError` where predictions differ by more than rounding explains."""
    if tolerance is None:
        return
    worst, largest, divergence = (measured[key] for key in JUDGED)
    allowed = inf if tolerance.logits is None else tolerance.logits * largest
    if not (worst <= allowed and divergence <= tolerance.divergence):
        raise ConversionError(
            f"the result ought to equal its source and does not: logits differ by up to {worst:.3g}, the greatest "
            f"being {largest:.3g}, and the KL divergence is {divergence:.3g}; please report this"
        )
