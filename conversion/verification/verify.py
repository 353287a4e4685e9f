"""Compares a model with its source: tensors, logits, cache size, and loading without crosshead."""

import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from crosshead.common.errors import ConversionError
from crosshead.common.fingerprint import model_fingerprint
from crosshead.common.model_location import expand_home
from crosshead.common.plain_text import read_text
from crosshead.common.progress import Counter, Progress, silent
from crosshead.common.torch_state import check_device, default_torch_state

from ..architectures.attention_names import decodes, predicts_tokens
from ..architectures.families import auto_class, family_of, kind_of, read_config, tensor_shapes, tied_tensors
from ..architectures.mixer_tensors import cache_bytes
from ..calibration.images import RANDOM_NAME, random_pixels, read_pixels
from ..calibration.streamed import stream
from ..calibration.streamed_model import StreamedModel
from ..calibration.text import DEFAULT_NAME, held_out_text, load_tokenizer, windows, within_context
from ..plan import check_source
from ..sources.model_folder import (
    RECORD,
    Advance,
    code_references,
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
from ..writing.loader_classes import load_processor
from .output_diff import compare_decoders, compare_encoders
from .reload import NEW_TOKENS, agreement, reload_check
from .reload_worker import continue_greedily, processor_report
from .tolerances import Tolerance, check_equal, recorded_tolerance

LENGTH, WINDOWS, IMAGES = 256, 4, 8
PROMPT_LENGTH, PROMPTS = 32, 3
"""Length of the windows, and number of windows or images, on which the model runs in a clean process."""
RELOAD_TOLERANCE = 1e-5
"""Maximum logit difference between this process and the clean process, relative to the largest logit."""
KEY_PROJECTIONS = ("k_proj.weight", "kv_a_proj_with_mqa.weight", "Attention.q.weight")
"""Endings of tensors with the dtype of the cache: key projections, or a T5's query projection."""
FAULTS = ("missing", "unexpected", "mismatched", "errors", "unloaded")
"""Kinds of tensors that do not load correctly, as `reload_worker.py` reports them."""


@dataclass(frozen=True)
class Sample:
    """The text or the images on which models are compared."""

    tokens: torch.Tensor
    """Token windows (B, T), or pixel values (B, channels, height, width)."""
    text: str
    """Name of the text or of the images in the record."""


def read_sample(source: Source, text: Path | None) -> Sample:
    """Return windows of a text file, or by default of the part of the default text that calibration does not read.

    For a model that reads images, return the images of a folder, or by default random pixel values.
    """
    config = read_config(source.config, kind_of(source.config), source.label)
    if family_of(config).reads_images:
        if text is None:
            return Sample(random_pixels(config, IMAGES), RANDOM_NAME)
        return Sample(read_pixels(source, config, text, IMAGES), text.resolve().name)
    content = held_out_text() if text is None else read_text(text, ConversionError)
    is_encoder = not decodes(config)
    count, length = within_context(config, WINDOWS, LENGTH)
    tokens = windows(load_tokenizer(source), content, length, count, config.vocab_size, is_encoder)
    return Sample(tokens, DEFAULT_NAME if text is None else text.name)


@default_torch_state()
def verify(
    source: str | Path,
    model: str | Path,
    *,
    revision: str | None = None,
    text: str | Path | None = None,
    trust_remote_code: bool = False,
    device: str = "cpu",
    progress: Progress = silent,
) -> dict[str, Any]:
    """Compare a model with its source, and return the report, which is also added to the conversion's record, if any.

    The model is loaded in a clean process, which runs the code in its folder. Code that differs from the code of this
    crosshead version runs only with `trust_remote_code`.

    `ConversionError` if the models differ although they should be equal: after a neutral conversion or a fold that was
    not followed by training.
    """
    if device not in ("cpu", "cuda"):
        raise ConversionError(f"--device {device} is not allowed: use cpu or cuda")
    check_device(device, ConversionError)
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as model_scratch:
        origin = open_source(source, revision, scratch=Path(scratch))
        converted = open_source(model, scratch=Path(model_scratch), further_files=["*.py", RECORD])
        if not trust_remote_code:
            refuse_foreign_code(converted)
        sample = read_sample(origin, None if text is None else expand_home(text))
        folder = folder_of(converted)
        record_path = None if folder is None else record_file(folder, kind_of(converted.config) == "stock")
        record = {} if record_path is None else read_record(record_path)
        total = sum(entry.size for checkpoint in (origin, converted) for entry in checkpoint.store.entries.values())
        advance = Counter(progress, "checking", total).add
        if record and record["source"]["digest"] != store_digest(origin.store, {}, advance):
            raise ConversionError(
                f"{model} was made from {record['source']['name']!r}; {source} has other weights: give its own source"
            )
        changed = changed_tensors(converted, record, advance) if record else set()
        allowed = record["tolerance"] if record and not changed else None
        tolerance = None if allowed is None else recorded_tolerance(allowed)
        measured = measure(origin, converted, sample, tolerance, progress, device)
        measured["tensors"] |= {"changed_since_conversion": len(changed)} if record else {}
        if record_path is not None and record and converted.origin["kind"] == "folder":
            with suppress(OSError):  # a published folder may be read-only
                write_json(record_path, record | {"verification": measured})
        check_equal(measured, tolerance)
        return {"verification": measured}


def verify_folder(
    source: Source, folder: Path, sample: Sample, tolerance: Tolerance | None, progress: Progress, device: str
) -> dict[str, Any]:
    """Compare a finished folder with its source; `ConversionError` if it differs by more than the tolerance."""
    with tempfile.TemporaryDirectory() as scratch:
        model = open_source(folder, scratch=Path(scratch))
        measured = measure(source, model, sample, tolerance, progress, device)
    check_equal(measured, tolerance)
    # A stock type may have a tokenizer class of its own, with which transformers loads the files of a folded model.
    if kind_of(model.config) == "crosshead" and measured["reload"].get("same_processor") is False:
        raise ConversionError(
            f"the tokenizer or image processor of {source.origin['name']} has other results or settings when loaded "
            "from the converted folder; please report this"
        )
    return measured


def measure(
    source: Source, model: Source, sample: Sample, tolerance: Tolerance | None, progress: Progress, device: str
) -> dict[str, Any]:
    """Return all measurements of a model and its source; differences beyond the tolerance are no error here."""
    (before, _), (after, tensors) = checked_model(source), checked_model(model)
    streamed = _streamed(source, before, model, after, device)
    on_cpu = streamed[0] if device == "cpu" else _streamed(source, before, model, after)[0]  # as the clean process
    prompts = sample.tokens[:PROMPTS] if sample.tokens.is_floating_point() else sample.tokens[:PROMPTS, :PROMPT_LENGTH]
    return _compared(streamed, tensors, sample, tolerance, progress) | {
        "kv_bytes_per_token_before": kv_cache_bytes(before, source.store.entries),
        "kv_bytes_per_token_after": kv_cache_bytes(after, model.store.entries),
        "fingerprint": None if (folder := folder_of(model)) is None else model_fingerprint(folder, with_config=False),
        "reload": _reload(on_cpu, model, after, prompts, load_processor(source)),
    }


def measure_logits(
    source: Source, model: Source, sample: Sample, tolerance: Tolerance | None, progress: Progress
) -> dict[str, Any]:
    """Return the measurements that need no folder; differences beyond the tolerance are no error here."""
    (before, _), (after, tensors) = checked_model(source), checked_model(model)
    return _compared(_streamed(source, before, model, after), tensors, sample, tolerance, progress)


_StreamedPair = tuple[StreamedModel, StreamedModel]


def _streamed(source: Source, before: Any, model: Source, after: Any, device: str = "cpu") -> _StreamedPair:
    # `talking` replaces the attention function, so that only eager attention gives identical results.
    is_eager = any(hasattr(config, "mixers") and "talking" in config.mechanisms() for config in (before, after))
    options = {"attn_implementation": "eager" if is_eager else "sdpa", "device": device}
    return stream(source.store, before, **options), stream(model.store, after, **options)


def _compared(
    streamed: _StreamedPair, tensors: dict[str, int], sample: Sample, tolerance: Tolerance | None, progress: Progress
) -> dict[str, Any]:
    compare = compare_decoders if predicts_tokens(streamed[0].config) else compare_encoders
    result = compare(*streamed, sample.tokens, partial(progress, "comparing"))
    return {"must_equal": tolerance is not None, "tensors": tensors, "sample": {"text": sample.text}, **result}


def folder_of(checkpoint: Source) -> Path | None:
    """Return the folder of a safetensors checkpoint; None for GGUF files."""
    return checkpoint.store.folder if isinstance(checkpoint.store, SafetensorsStore) else None


def refuse_foreign_code(model: Source) -> None:
    """Refuse a model if verification would run code that this crosshead version did not write."""
    folder = folder_of(model)
    file = foreign_code(folder) if folder is not None and code_references(folder) else None
    if file is not None:
        raise ConversionError(
            f"{model.origin['name']} contains code that this crosshead did not write ({file}), and verification would "
            "run it: read it, then add --trust-remote-code"
        )


def checked_model(checkpoint: Source) -> tuple[Any, dict[str, int]]:
    """Return the config of a checkpoint and its tensor counts; `ConversionError` if tensors do not fit the config."""
    config = read_config(checkpoint.config, kind_of(checkpoint.config), checkpoint.label)
    shapes = tensor_shapes(config, checkpoint.store.entries)
    check_source(checkpoint.store, shapes, tied_tensors(config))
    return config, {"expected": len(shapes), "missing": 0, "unexpected": 0}


def kv_cache_bytes(config: Any, entries: Mapping[str, Entry]) -> int:
    """Return the bytes of KV cache per token, in the dtype of the key projection; 0 for an encoder."""
    if not decodes(config):
        return 0
    stored = next(entry.dtype for name, entry in entries.items() if name.endswith(KEY_PROJECTIONS))
    if not hasattr(config, "mixers"):
        config = family_of(config).crosshead.from_dict(config.to_dict() | {"mixers": {}})
    return cache_bytes(config, DTYPES[stored])


def _reload(
    source: StreamedModel, model: Source, config: Any, prompts: torch.Tensor, processor: Any
) -> dict[str, Any]:
    """Load the folder in a clean process; compare its logits with this process, its greedy text with the source.

    The tokenizer or image processor of the folder is compared with the source's, `processor`.
    """
    name, folder = model.origin["name"], folder_of(model)
    if folder is None:
        raise ConversionError(f"{name} is not a safetensors folder: give the result of a conversion")
    report, outputs = reload_check(folder, prompts, auto_class(config))
    faults = {kind: report.pop(kind) for kind in FAULTS if kind in report}  # fewer kinds for names and shapes only
    for kind, names in faults.items():
        if names:
            raise ConversionError(f"{name} does not load completely in a clean process: {kind} {names[0]}")
    if outputs is not None:
        expected = final_logits(stream(model.store, config), prompts)  # with the attention of `from_pretrained`
        difference, largest = float((outputs - expected).abs().max()), float(expected.abs().max())
        if not difference <= RELOAD_TOLERANCE * largest:
            raise ConversionError(
                f"{name} computes other outputs in a clean process: they differ by up to {difference:.3g}, the "
                f"largest is {largest:.3g}; please report this"
            )
        report["greatest_logit_difference"] = difference
    report["tensors"] = {kind: len(names) for kind, names in faults.items()}
    loaded = report.pop("processor", None)
    if processor is not None:
        report["same_processor"] = loaded == processor_report(processor)
    if "continuations" in report:
        with source.whole() as whole:
            expected_tokens = continue_greedily(whole, prompts, NEW_TOKENS)
        report["greedy_text_agreement"] = agreement(expected_tokens, report.pop("continuations"))
        report["greedy_text"] = report.pop("texts")[0]
    return report


@torch.no_grad()
def final_logits(model: StreamedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return logits (B, T, vocabulary) or (B, classes), or last hidden states (B, T, hidden)."""
    with model.head() as head:
        return head(model.run(tokens))


def changed_tensors(model: Source, record: Mapping[str, Any], advance: Advance) -> set[str]:
    """Return the tensors that differ from the conversion's output: after training, or if the files are damaged."""
    written = {name: tensor["crc32"] for name, tensor in record["tensors"].items()}
    return {name for name, _ in written.items() ^ stored_digests(model.store, {}, advance).items()}
