"""Any recipe at a size that runs in seconds on a CPU, with its structure: `crosshead train RECIPE --toy FOLDER`.

Family, heads, mechanisms, what is trainable, schedule, accumulation and distillation stay. What a run needs beside
the recipe is made: a tokenizer of bytes, the text that every CPython carries, a model to continue, a teacher.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

from crosshead.common.errors import RecipeError
from crosshead.modeling.configuration import LAYERS
from crosshead.modeling.mechanisms import RULES
from crosshead.modeling.options import Count

from .model_config import model_config, named_model_config
from .recipe import Recipe
from .sections import DataOptions, DataSource, ModelOptions, TrainOptions

TOY_LAYERS = 4
STEPS = 6
LENGTH = 64
SEQUENCES = 4
HELD_OUT = 0.1
END = "<end>"
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def toy(recipe: Recipe, folder: Path) -> Recipe:
    """The small recipe; what it needs is written into the folder."""
    if recipe.model.config is None:
        raise RecipeError("--toy builds a small model from model.config, which this recipe lacks")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = folder / "tokenizer"
    config = toy_config(recipe.model.config, write_tokenizer(tokenizer))
    path, distillation = None, recipe.distillation
    if recipe.model.path is not None:
        path = _write_model(config, folder / "model", recipe.train.seed)
    if distillation is not None and distillation.logits is None:
        teacher = _write_model(config | {"mixers": {}}, folder / "teacher", recipe.train.seed)
        steps = min(distillation.match_steps, STEPS // 3)
        distillation = replace(distillation, teacher=teacher, match_steps=steps)
    return replace(
        recipe,
        output=str(folder / "run"),
        model=ModelOptions(path=path, config=config, tokenizer=str(tokenizer)),
        data=_toy_data(recipe.data, folder),
        train=_toy_train(recipe.train),
        distillation=distillation,
        watch=replace(recipe.watch, every=1, evaluate_every=recipe.watch.evaluate_every and STEPS // 2),
        checkpoints=replace(recipe.checkpoints, every=STEPS // 2),
        hub=None,
    )


def toy_config(content: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
    """As many heads, and mechanisms in as large a part of the layers; everything else small."""
    large = model_config(content)
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": 4 * large.num_attention_heads,
        "intermediate_size": 64,
        "head_dim": 8,
        "num_hidden_layers": min(TOY_LAYERS, large.num_hidden_layers),
    }
    kept = sizes["num_hidden_layers"]
    layers = [index * large.num_hidden_layers // kept for index in range(kept)]
    mixers = {name: _toy_options(name, options, layers) for name, options in large.mixers.items()}
    return dict(content) | sizes | (EXPERTS if "num_experts" in content else {}) | {"mixers": mixers}


def _toy_options(name: str, options: Mapping[str, Any], layers: list[int]) -> dict[str, Any]:
    """A mechanism's options for the layers that are kept."""
    kinds = RULES[name].options
    small = {
        key: [value[layer] for layer in layers]
        if isinstance(kinds.get(key), Count) and isinstance(value, list)
        else value
        for key, value in options.items()
    }
    if LAYERS in options:
        small[LAYERS] = [index for index, layer in enumerate(layers) if layer in options[LAYERS]] or [len(layers) // 2]
    return small


def _toy_data(data: DataOptions, folder: Path) -> DataOptions:
    """As many sources, all of them the same text: a document each help topic."""
    text = write_text(folder / "text.jsonl")
    sources = tuple(DataSource(text, "jsonl", weight=source.weight) for source in data.sources)
    kept = HELD_OUT if data.held_out or data.evaluation else 0.0
    return replace(data, sources=sources, length=LENGTH, held_out=kept, evaluation=(), cache=str(folder / "tokens"))


def write_text(path: Path) -> str:
    """The text that every CPython carries, as JSON lines; returns the path."""
    path.write_text("".join(json.dumps({"text": topics[name]}) + "\n" for name in sorted(topics)), encoding="utf-8")
    return str(path)


def _toy_train(train: TrainOptions) -> TrainOptions:
    """Two micro batches a step, in float32; a warmup of steps becomes one step."""
    batch = SEQUENCES * LENGTH
    return replace(
        train,
        tokens=STEPS * batch,
        batch_tokens=batch,
        micro_batch=SEQUENCES // 2,
        warmup=1.0 if train.warmup else 0.0,
        dtype="float32",
    )


def write_tokenizer(folder: Path) -> int:
    """One token a byte, and one for the end of a document; returns how many there are."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), END]
    bytes_alone = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=bytes_alone, eos_token=END).save_pretrained(str(folder))
    return len(letters)


def _write_model(content: Mapping[str, Any], folder: Path, seed: int) -> str:
    """A fresh model on disk, without disturbing anybody's random numbers."""
    from transformers import AutoModelForCausalLM

    with named_model_config(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(model_config(content)).save_pretrained(str(folder))
    return str(folder)
