"""A model beside its source: every tensor, what both predict, what the cache takes, and whether it loads elsewhere."""

import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from crosshead.modeling.mechanisms import MECHANISMS

from .calibrating import DEFAULT_NAME, HELD_OUT, load_tokenizer
from .compare import compare
from .created import mixed_shapes
from .errors import ConversionError
from .exactness import cache_bytes
from .families import FAMILIES, PREFIX, read_config, stock_shapes
from .job import Job, Progress, silent
from .plan import check_source
from .published_folder import RECORD, foreign_code, read_record, store_digest, stored_digest, write_json
from .reload import NEW_TOKENS, agreement, reload_check
from .reload_worker import continue_greedily
from .safetensors_store import SafetensorsStore
from .sources import Source, open_source
from .store import DTYPES
from .streamed_model import StreamedModel
from .text import default_text, read_text, windows

SAMPLE_LENGTH, SAMPLE_WINDOWS = 256, 4
PROMPT_LENGTH, PROMPTS = 32, 3


def verify(
    source: str | Path,
    model: str | Path,
    *,
    revision: str | None = None,
    text: str | Path | None = None,
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Compare a model with its source; the report also goes to the model's `conversion.json` where it has one.

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
        made = open_source(model, scratch=folders[1])
        if not trust_remote_code:
            refuse_foreign_code(made)
        record = read_record(Path(model)) if Path(model).is_dir() else {}
        if record and record["source"]["digest"] != store_digest(origin.store, {}):
            raise ConversionError(
                f"{model} was made from {record['source']['name']!r}; {source} has other weights: give its own source"
            )
        unchanged = bool(record) and is_as_written(made, record)
        measured = measure(origin, made, None if text is None else Path(text), progress)
        if record:
            write_json(Path(model) / RECORD, record | {"verification": measured})
        check_equal(measured, record.get("tolerance") if unchanged else None)
        return {"verification": measured}


def verify_job(job: Job, folder: Path, progress: Progress) -> dict[str, Any]:
    """What a conversion does before its folder is published."""
    with tempfile.TemporaryDirectory() as scratch:
        measured = measure(job.source, open_source(folder, scratch=Path(scratch)), None, progress)
    check_equal(measured, job.tolerance)
    return measured


def measure(source: Source, model: Source, text: Path | None, progress: Progress) -> dict[str, Any]:
    """What there is to say of a model and its source, without judging it."""
    before, after = checked_config(source), checked_config(model)
    prose = held_out_text() if text is None else read_text(text)
    tokenizer = load_tokenizer(source)
    sample = windows(tokenizer, prose, SAMPLE_LENGTH, SAMPLE_WINDOWS, before.vocab_size)
    attention = "eager" if needs_weights(before) or needs_weights(after) else "sdpa"
    streamed = (
        StreamedModel(source.store, before, attn_implementation=attention),
        StreamedModel(model.store, after, attn_implementation=attention),
    )
    compared = compare(*streamed, sample, lambda *done: progress("comparing", *done))
    cache = {"before": cache_of(before, source), "after": cache_of(after, model)}
    return {
        "tensors": len(model.store.entries),
        "sample": {"text": DEFAULT_NAME if text is None else text.name},
        **asdict(compared),
        "kv_bytes_per_token_before": cache["before"],
        "kv_bytes_per_token_after": cache["after"],
        "reload": reloaded(streamed, model, sample[:PROMPTS, :PROMPT_LENGTH]),
    }


def needs_weights(config: Any) -> bool:
    """Whether a mechanism runs on eager attention alone; two models are compared on the same one."""
    return any(MECHANISMS[name].needs_weights for name in getattr(config, "mixers", ()))


def refuse_foreign_code(model: Source) -> None:
    """`ConversionError` where verification would run code that somebody else may have written."""
    folder = getattr(model.store, "folder", None)
    file = None if folder is None or "auto_map" not in model.config else foreign_code(folder)
    if file is not None:
        raise ConversionError(
            f"{model.origin['name']} brings code that is not this crosshead's own ({file}), and verification would "
            "run it: look at it, then say --trust-remote-code"
        )


def checked_config(checkpoint: Source) -> Any:
    """The configuration of a checkpoint whose tensors are all there, and no others."""
    kind = "mixed" if str(checkpoint.config.get("model_type")).startswith(PREFIX) else "stock"
    config = read_config(checkpoint.config, kind, checkpoint.origin["name"])
    shapes = stock_shapes(config)
    held = mixed_shapes(config, shapes) if kind == "mixed" else shapes
    check_source(checkpoint.store, held, config.tie_word_embeddings)
    return config


def held_out_text() -> str:
    """The part of the default text that calibration does not read."""
    text = default_text()
    return text[int(len(text) * HELD_OUT) :]


def cache_of(config: Any, checkpoint: Source) -> int:
    """Bytes of cache for each token, in the dtype of the weights."""
    stored = next(entry.dtype for name, entry in checkpoint.store.entries.items() if name.endswith("k_proj.weight"))
    family = FAMILIES[config.model_type.removeprefix(PREFIX)]
    mixed = config if hasattr(config, "mixers") else family.mixed.from_dict(config.to_dict() | {"mixers": {}})
    return cache_bytes(mixed, DTYPES[stored].itemsize)


def reloaded(streamed: tuple[StreamedModel, StreamedModel], model: Source, prompts: torch.Tensor) -> dict[str, Any]:
    """Whether the folder loads where crosshead is not installed, and how its text compares with the source's."""
    if not isinstance(model.store, SafetensorsStore):
        raise ConversionError(f"{model.origin['name']} is not a folder of safetensors, so no result of a conversion")
    found = reload_check(model.store.folder, prompts, final_logits(streamed[1], prompts))
    faults = {kind: found.pop(kind) for kind in ("missing", "unexpected", "mismatched", "errors", "unloaded")}
    for kind, names in faults.items():
        if names:
            raise ConversionError(f"{model.origin['name']} does not load whole elsewhere: {kind} {names[0]}")
    continuations, texts = found.pop("continuations", None), found.pop("texts", None)
    if continuations is not None and texts is not None:
        with streamed[0].whole() as source:
            found["greedy_text_agreement"] = agreement(continue_greedily(source, prompts, NEW_TOKENS), continuations)
        found["greedy_text"] = texts[0]
    return found


@torch.no_grad()
def final_logits(model: StreamedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Logits (B, T, vocabulary)."""
    with model.head() as head:
        return head(model.run(tokens))


def is_as_written(model: Source, record: Mapping[str, Any]) -> bool:
    """Whether every tensor still is what the conversion wrote."""
    written = {name: tensor["crc32"] for name, tensor in record["tensors"].items()}
    return written == {name: stored_digest(model.store, name) for name in model.store.entries}


def check_equal(measured: Mapping[str, Any], tolerance: float | None) -> None:
    """`ConversionError` where logits differ by more than a part of the greatest that is rounding."""
    worst, largest = measured["greatest_logit_difference"], measured["largest_logit"]
    if tolerance is not None and not worst <= tolerance * largest:
        raise ConversionError(
            f"the result ought to equal its source and does not: logits differ by up to {worst:.3g}, the greatest "
            f"being {largest:.3g}; please report this"
        )
