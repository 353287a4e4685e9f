"""Evaluates the demo's models: scores, and greedy text with the size of the KV cache."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch

from crosshead.common.progress import Progress
from crosshead.conversion.sources.model_folder import write_json
from crosshead.conversion.verification.engines import verify_in_engine
from crosshead.evals.harness.evaluate import evaluate
from crosshead.evals.open_model import load_model, open_model
from crosshead.modeling.cache import CACHE

PROMPT = "The sun rises in the east and sets in the west. At night"
NEW_TOKENS = 24


def score(models: Sequence[str], limit: int, target: Path, show: Progress) -> None:
    """Score models on the offline suite, with `limit` items per task, and compare each with the first."""
    done = count()  # the first message is about the tasks, and each other about a model

    def progress(message: str) -> None:
        show(message, next(done), len(models))

    report = evaluate(models, "offline", limit=limit, compared=True, progress=progress)
    write_json(target, report)


def decode(models: Sequence[str], target: Path, show: Progress) -> None:
    """Continue PROMPT with each model; write the texts and the cache sizes to `target`."""
    results = []
    for number, name in enumerate(models):
        show("decoding", number, len(models))
        results.append(decoded(name))
    write_json(target, {"prompt": PROMPT, "new_tokens": NEW_TOKENS, "models": results})


def in_engines(source: str, model: Path, engines: Sequence[str], target: Path, show: Progress) -> None:
    """Run both models in each serving engine, and write the reports to `target`."""
    reports = [verify_in_engine(source, model, engine, progress=show)["engine"] for engine in engines]
    write_json(target, {"engines": reports})


@torch.no_grad()
def decoded(name: str) -> dict[str, Any]:
    """The greedy continuation of PROMPT by one model, and the bytes of its KV cache."""
    opened = open_model(name)
    model = load_model(opened)
    prompt = opened.tokenizer(PROMPT, return_tensors="pt").to(model.device)
    output = model.generate(
        input_ids=prompt["input_ids"],
        attention_mask=prompt["attention_mask"],
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        use_cache=True,
    )
    layers = output[CACHE].layers
    size = sum(part.nbytes for layer in layers for part in (layer.keys, layer.values))
    tokens = layers[0].get_seq_length()
    new = output.sequences[0, prompt["input_ids"].shape[1] :]
    return {
        "model": name,
        "text": opened.tokenizer.decode(new, skip_special_tokens=True),
        "cached_tokens": tokens,
        "cache_bytes": size,
        "bytes_per_token": size / tokens,
        "dtype": str(layers[0].keys.dtype).removeprefix("torch."),
    }
