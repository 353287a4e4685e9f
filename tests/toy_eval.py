"""Toy models that `crosshead eval` can score, and custom lm_eval tasks."""

import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import yaml

import toys
from toy_checkpoints import CHARACTERS, character_tokenizer

ITEMS = [
    {"text": "the cat sat on the", "choices": ["mat", "mad"], "label": 0},
    {"text": "a dog ran after the", "choices": ["cap", "cat"], "label": 1},
    {"text": "we eat bread and", "choices": ["jam", "ham", "gym"], "label": 1},
    {"text": "one two three", "choices": ["four", "five"], "label": 0},
    {"text": "up and", "choices": ["down", "done"], "label": 0},
    {"text": "day and", "choices": ["knight", "night"], "label": 1},
]
CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{text}}",
    "doc_to_target": "label",
    "doc_to_choice": "choices",
    "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")],
}
ROLLING = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
WRITTEN = {
    "output_type": "generate_until",
    "doc_to_text": "{{text}}",
    "doc_to_target": "{{choices[label]}}",
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
WORD = {
    "output_type": "loglikelihood",
    "doc_to_text": "{{text}}",
    "doc_to_target": " {{choices[label]}}",
    "metric_list": [
        {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
        {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
    ],
}


def write_scorable(model: Any, folder: Path) -> Path:
    """Save a model with a character tokenizer that has an EOS token, as scoring needs; return its folder."""
    tokenizer = character_tokenizer()
    tokenizer.eos_token = "<unknown>"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def trained_model(steps: int = 150) -> Any:
    """Return a stock toy, trained for `steps` steps on English text, character by character."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = toys.stock_config("Llama", initializer_range=0.05, max_position_embeddings=512)
        model = toys.STOCK["Llama"][1](config)
        text = "".join(letter for letter in "".join(map(topics.get, sorted(topics))).lower() if letter in CHARACTERS)
        tokens = torch.tensor(character_tokenizer()(text[:200_000])["input_ids"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(steps):
            starts = torch.randint(len(tokens) - 65, (16, 1))
            batch = tokens[starts + torch.arange(64)]
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.eval()


def write_task(
    folder: Path, name: str, kind: dict[str, Any], items: list[dict[str, Any]] | None = None, **more: Any
) -> None:
    """Write a custom lm_eval task: `name`.yaml, and its data as JSON lines."""
    folder.mkdir(exist_ok=True)
    data = folder / f"{name}.jsonl"
    data.write_text("".join(f"{json.dumps(item)}\n" for item in (ITEMS if items is None else items)))
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **source, **kind, **more}))
