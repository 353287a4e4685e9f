"""Shrink a recipe to a size that runs in seconds on a CPU: `crosshead train RECIPE --toy FOLDER`.

Model family, heads, mechanisms, trainable parameters, schedule, gradient accumulation and distillation stay the same.
The folder receives a byte-level tokenizer and a text that is part of CPython, or images of stripes, and random
weights for the initial model and the teacher if the recipe has them.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from math import cos, pi, sin
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from typing import Any

import numpy as np
import torch
import transformers

from crosshead.common.errors import RecipeError, one_line
from crosshead.common.model_location import expand_home
from crosshead.modeling.configuration import LAYERS
from crosshead.modeling.mechanisms import RULES
from crosshead.modeling.options import Count

from ..data.image_sources import require_pillow
from ..data.images import image_processor
from .dit_config import dit_config
from .model_config import CLASS_COUNT, CLASSIFIERS, known_keys, model_config, named_model_config
from .objectives import NEXT_TOKEN, Noise, ObjectiveOptions
from .recipe import Recipe
from .sections import DataOptions, DataSource, ModelOptions

TOY_LAYERS = 4
STEPS = 6
LENGTH = 64
SEQUENCES = 4
HELD_OUT = 0.1
END = "<end>"
SPECIAL_TOKENS: dict[str, Mapping[str, Any]] = {
    "masked_tokens": {"pad_token": "<pad>", "cls_token": "<cls>", "sep_token": "<sep>", "mask_token": "<mask>"},
    "spans": {"pad_token": "<pad>", "extra_special_tokens": [f"<extra_id_{number}>" for number in range(LENGTH)]},
}
"""Objective -> special tokens of its toy tokenizer, as arguments of `PreTrainedTokenizerFast`."""
MARKER = ".crosshead-toy"
"""Marker file of a folder that `--toy` has made and may overwrite."""
SYSTEM_ERROR = "(os error "
"""Marks an operating-system error in the messages of Rust libraries (safetensors, tokenizers)."""
HEAD_SIZE, SAMPLE_SIZE, WIDTH = 4, 8, 8
"""Toy diffusion model: head dimension, side length in pixels or latents, channels of the autoencoder."""
CLASSES, IMAGES, IMAGE_SIZE = 4, 12, 32
"""Toy images: number of classes, number of images per class, and side length in pixels."""
PERIOD, NOISE = 8.0, 0.2
"""Stripe period in pixels, and standard deviation of the noise for stripes with values from -1 to 1."""
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
LATENT |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
LATENT |= {"n_group": 2, "topk_group": 1, "head_dim": 4}  # in MLA configs, head_dim is the rotary dimension
"""Maximum sizes of a toy model with MLA."""


def toy_in_own_folder(recipe: Recipe, folder: Path) -> Recipe:
    """Call `toy` if the folder is new, empty or made by an earlier call, so that no user files are overwritten."""
    folder = expand_home(folder)
    try:
        if folder.exists() and not (folder / MARKER).exists() and any(folder.iterdir()):
            raise RecipeError(f"--toy={folder} has files that --toy has not made: give a new or an empty folder")
        return toy(recipe, folder)
    except Exception as error:  # on a full disk, safetensors and tokenizers raise their own exception types
        if isinstance(error, OSError) or SYSTEM_ERROR in str(error):
            raise RecipeError(f"--toy={folder} cannot be read or written: {one_line(error)}") from error
        raise


def toy(recipe: Recipe, folder: Path) -> Recipe:
    """Return the small recipe, and write its tokenizer, data and models into the folder."""
    if recipe.model.config is None:
        raise RecipeError("--toy makes a small model from model.config, which is missing in this recipe")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()
    if isinstance(recipe.objective, Noise):
        return _small_run(recipe, folder, _toy_diffusion(recipe, folder))
    objective, tokenizer = recipe.objective, folder / "tokenizer" if recipe.counts_tokens else None
    vocabulary = write_tokenizer(tokenizer, **SPECIAL_TOKENS.get(objective.name, {})) if tokenizer else 0
    config = toy_config(recipe.model.config, vocabulary, objective)
    path, distillation = None, recipe.distillation
    if recipe.model.path is not None:
        path = _write_model(config, folder / "model", recipe.train.seed, objective)
    if distillation is not None and distillation.logits is None:
        teacher = _write_model(config | {"mixers": {}}, folder / "teacher", recipe.train.seed, objective)
        steps = {name: min(getattr(distillation, name), STEPS // 3) for name in ("match_steps", "transfer_steps")}
        distillation = replace(distillation, teacher=teacher, **steps)
    model = ModelOptions(path=path, config=config, tokenizer=str(tokenizer) if tokenizer else None)
    return _small_run(replace(recipe, distillation=distillation), folder, model)


def _small_run(recipe: Recipe, folder: Path, model: ModelOptions) -> Recipe:
    """Return the recipe with the given small model, and little data for a few steps of two micro batches."""
    unit, batch = recipe.objective.unit, SEQUENCES * LENGTH if recipe.counts_tokens else SEQUENCES
    amounts: dict[str, Any] = {unit: STEPS * batch, f"batch_{unit}": batch}
    warmup = 1.0 if recipe.train.warmup else 0.0
    return replace(
        recipe,
        output=str(folder / "run"),
        model=model,
        data=_toy_data(recipe.data, folder, recipe.counts_tokens),
        train=replace(recipe.train, **amounts, micro_batch=SEQUENCES // 2, warmup=warmup, dtype="float32"),
        watch=replace(recipe.watch, every=1, evaluate_every=recipe.watch.evaluate_every and STEPS // 2),
        checkpoints=replace(recipe.checkpoints, every=STEPS // 2),
        hub=None,
    )


def toy_config(
    content: Mapping[str, Any], vocabulary: int, objective: ObjectiveOptions = NEXT_TOKEN
) -> dict[str, Any]:
    """Return a small model configuration: same heads, mechanisms in the same fraction of layers, small sizes."""
    large = model_config(content, objective)
    if hasattr(large, "depths"):
        return _toy_staged_config(content, large)
    count = min(TOY_LAYERS, large.num_hidden_layers)
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": 4 * large.num_attention_heads,
        "embedding_size": 16,
        "intermediate_size": 64,
        "d_ff": 64,
        "head_dim": 8,
        "num_hidden_layers": count,
        "num_decoder_layers": count,
    }
    if objective.auto_class == CLASSIFIERS:
        sizes |= {CLASS_COUNT: CLASSES, "image_size": 4 * large.patch_size}
    known, fields = known_keys(type(large)), type(large).attribute_map
    sizes = {fields.get(name, name): size for name, size in sizes.items() if fields.get(name, name) in known}
    if "num_experts" in content:
        sizes |= EXPERTS
    if hasattr(large, "kv_lora_rank"):
        values = {name: getattr(large, name) for name in LATENT}
        sizes |= {name: min(value, LATENT[name]) for name, value in values.items() if value is not None}
    layers = _spread(large.num_hidden_layers, count)
    if content.get("layer_types"):
        sizes["layer_types"] = [large.layer_types[layer] for layer in layers]
    ids = {key: value for key, value in content.items() if key.endswith("_token_id") and isinstance(value, int)}
    kept = {key: value for key, value in content.items() if key not in ids or value < vocabulary}
    if not large.is_encoder_decoder:
        return kept | sizes | {"mixers": _toy_mixers(large.mixers, layers)}
    of_decoder, parts = _spread(large.num_decoder_layers, count), large.mixers.items()
    mixers = {part: _toy_mixers(options, layers if part == "encoder" else of_decoder) for part, options in parts}
    return kept | sizes | {"mixers": mixers}


def _toy_staged_config(content: Mapping[str, Any], large: Any) -> dict[str, Any]:
    """Return the small configuration of a vision transformer with stages: the first layer of each stage."""
    first_layers = [sum(large.depths[:stage]) for stage in range(len(large.depths))]
    sizes = {
        CLASS_COUNT: CLASSES,
        "hidden_sizes": [4 * heads for heads in large.num_attention_heads],
        "depths": [1] * len(large.depths),
        "image_size": 64,
    }
    sizes = {name: size for name, size in sizes.items() if name in known_keys(type(large))}
    return dict(content) | sizes | {"mixers": _toy_mixers(large.mixers, first_layers)}


def _spread(layers: int, count: int) -> list[int]:
    """Return `count` evenly spaced indices of layers."""
    return [index * layers // count for index in range(count)]


def _toy_mixers(mixers: Mapping[str, Any], layers: list[int]) -> dict[str, Any]:
    """Return the mechanisms with their options for a subset of the layers, with the layers renumbered from 0."""
    small: dict[str, Any] = {}
    for name, options in mixers.items():
        kinds = RULES[name].options
        small[name] = {
            key: [value[layer] for layer in layers]
            if isinstance(kinds.get(key), Count) and isinstance(value, list)
            else value
            for key, value in options.items()
        }
        if LAYERS in options:
            kept = [index for index, layer in enumerate(layers) if layer in options[LAYERS]]
            small[name][LAYERS] = kept or [len(layers) // 2]
    return small


def _toy_data(data: DataOptions, folder: Path, is_text: bool) -> DataOptions:
    """Return the data section with as many sources, all of the same toy text (Python's help topics) or toy images."""
    cache = str(folder / "tokens")
    if is_text:
        toy_source = DataSource(write_text(folder / "text.jsonl"), "jsonl")
    else:
        toy_source = DataSource(write_toy_images(folder / "images"), "images")
    sources = tuple(replace(toy_source, weight=source.weight) for source in data.sources)
    held_out = HELD_OUT if data.held_out or data.evaluation else 0.0
    return replace(data, sources=sources, length=LENGTH, held_out=held_out, evaluation=(), cache=cache)


def write_text(path: Path) -> str:
    """Write Python's help topics, a text that is part of CPython, as JSON lines; return the path."""
    path.write_text("".join(json.dumps({"text": topics[name]}) + "\n" for name in sorted(topics)), encoding="utf-8")
    return str(path)


def write_toy_images(folder: Path) -> str:
    """Write images of stripes, whose direction is the class, as PNG files in one folder per class; return the path."""
    pillow = require_pillow()
    rows, columns = np.indices((IMAGE_SIZE, IMAGE_SIZE))
    for number in range(CLASSES):
        angle = pi * number / CLASSES
        class_folder = folder / f"{round(180 * number / CLASSES)}_degrees"
        class_folder.mkdir(parents=True, exist_ok=True)
        for index in range(IMAGES):
            draws = Random(f"{number} {index}")
            phase = draws.uniform(0, 2 * pi)
            waves = np.sin(2 * pi / PERIOD * (columns * cos(angle) + rows * sin(angle)) + phase)
            noise = np.array([draws.gauss(0, NOISE) for _ in range(waves.size)]).reshape(waves.shape)
            pixels = np.clip(127.5 * (1 + 0.7 * (waves + noise)), 0, 255).astype(np.uint8)
            pillow.Image.fromarray(pixels).save(class_folder / f"{index}.png")
    return str(folder)


def write_tokenizer(folder: Path, **special: Any) -> int:
    """Write a byte-level tokenizer with an end-of-document token; return the number of tokens.

    `special` has further special tokens, as keyword arguments of `PreTrainedTokenizerFast`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special_tokens = [token for value in special.values() for token in ([value] if isinstance(value, str) else value)]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), END, *special_tokens]
    byte_level = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=byte_level, eos_token=END, **special).save_pretrained(str(folder))
    return len(tokens)


def _write_model(content: Mapping[str, Any], folder: Path, seed: int, objective: ObjectiveOptions) -> str:
    """Write a model with random weights and return its path; the global random state is unchanged."""
    kind = getattr(transformers, objective.auto_class)
    with named_model_config(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.from_config(model_config(content, objective))
    model.save_pretrained(str(folder))
    if objective.auto_class == CLASSIFIERS:
        image_processor(model.config.image_size, model.config.num_channels).save_pretrained(str(folder))
    return str(folder)


def _toy_diffusion(recipe: Recipe, folder: Path) -> ModelOptions:
    """Return the section `model` of a diffusion recipe with a small DiT and, if the recipe has one, autoencoder."""
    content = recipe.model.config or {}
    large = dit_config(content)
    count = min(TOY_LAYERS, large.num_layers)
    config = content | {
        "num_layers": count,
        "attention_head_dim": HEAD_SIZE,
        "sample_size": SAMPLE_SIZE,
        "patch_size": min(2, large.patch_size),
        "num_embeds_ada_norm": CLASSES,
        "mixers": _toy_mixers(large.mixers, _spread(large.num_layers, count)),
    }
    vae = None if recipe.model.vae is None else _write_vae(folder / "vae", large.in_channels, recipe.train.seed)
    return replace(recipe.model, config=config, vae=vae)


def _write_vae(folder: Path, channels: int, seed: int) -> str:
    """Write a random autoencoder whose latents have half the image's side length; return its path."""
    from diffusers import AutoencoderKL

    kind: Any = AutoencoderKL
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(WIDTH,) * 2,
            norm_num_groups=WIDTH // 2,
            latent_channels=channels,
        ).save_pretrained(str(folder))
    return str(folder)
