"""Opens a model for evaluation: configuration and tokenizer first, with checks, and the weights later."""

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from crosshead.common.errors import EvalError
from crosshead.common.model_location import (
    ADAPTER,
    MERGE_ADAPTER,
    check_layers,
    expand_home,
    failed_load,
    model_label,
    pretrained_arguments,
    split_revision,
)
from crosshead.common.plain_text import has_vocabulary
from crosshead.modeling import BACKBONES

CAUSAL = ("ForCausalLM", "LMHeadModel")
"""Endings of class names of causal language models, for classes that transformers does not list."""


@dataclass(frozen=True)
class Opened:
    """A model whose config is loaded, but not its weights; the tokenizer is loaded if it is needed."""

    name: str
    config: Any
    tokenizer: Any = None
    trust_remote_code: bool = False

    @property
    def label(self) -> str:
        """Short name of the model."""
        return model_label(self.name)


def open_model(name: str, trust_remote_code: bool = False) -> Opened:
    """Open a causal language model in a directory or on the Hub.

    Code that is not crosshead's runs only with `trust_remote_code`.
    """
    opened = open_config(name, trust_remote_code)
    # transformers would load other models as language models, and create an empty tokenizer if its files are missing.
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    classes = opened.config.architectures or []
    if classes and not any(class_name in known or class_name.endswith(CAUSAL) for class_name in classes):
        raise EvalError(f"{name} is a {classes[0]}, not a causal language model")
    return with_tokenizer(opened)


def open_config(name: str, trust_remote_code: bool = False) -> Opened:
    """Open a model of any kind, without its tokenizer."""
    path, hub = expand_home(name), split_revision(name)[0]
    if not path.is_dir() and (path.exists() or name[:1] in ("", ".", "/", "~") or hub.count("/") > 1):
        raise EvalError(f"{name!r} is not a directory: give a model directory or a Hub id")
    if _is_diffusion_model(path):
        raise EvalError(
            f"{name} is a model of diffusers, which cannot be read here: inspect reads a DiT and its pipeline, cost a "
            "DiT's own folder"
        )
    if path.is_dir() and not (path / "config.json").is_file():
        if (path / ADAPTER).is_file():
            raise EvalError(f"{path} is an adapter of peft without its model: {MERGE_ADAPTER}")
        raise EvalError(f"{path} is not a model directory: config.json is missing")
    location = str(path) if path.is_dir() else name
    config = from_pretrained(AutoConfig, location, "configuration", trust_remote_code)
    check_layers(config, name, EvalError)
    return Opened(location, config, trust_remote_code=trust_remote_code)


def _is_diffusion_model(folder: Path) -> bool:
    """Whether a folder has a model or a pipeline of diffusers; their JSON files name a class and no model type."""
    if not (folder / "config.json").is_file():
        return (folder / "model_index.json").is_file()
    try:
        content = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):  # an unreadable file, which the caller reports
        return False
    return isinstance(content, dict) and "_class_name" in content


def with_tokenizer(opened: Opened) -> Opened:
    """Return the model with its tokenizer, which must have a vocabulary."""
    tokenizer = from_pretrained(AutoTokenizer, opened.name, "tokenizer", opened.trust_remote_code)
    if not has_vocabulary(tokenizer):
        raise EvalError(f"{opened.name} has no tokenizer with a vocabulary: copy the tokenizer's files into it")
    return replace(opened, tokenizer=tokenizer)


def check_backbone(opened: Opened) -> None:
    """Raise `EvalError` if the model does not have a backbone that crosshead supports."""
    ours = [backbone.model_type for backbone in BACKBONES]
    allowed = [*(model_type.removeprefix("crosshead_") for model_type in ours), *ours]
    if opened.config.model_type not in allowed:
        raise EvalError(
            f"{opened.name} has model_type={opened.config.model_type!r}, which is not supported: allowed are "
            f"{', '.join(allowed)}"
        )


def check_tokens(tokens: Sequence[int], vocabulary: int, tokenizer: str = "the tokenizer") -> None:
    """Raise `EvalError` if a token id of the tokenizer is not in the model's vocabulary."""
    if max(tokens, default=0) >= vocabulary:
        raise EvalError(
            f"{tokenizer} returns the token {max(tokens)}, but the model's vocabulary ends at {vocabulary - 1}: "
            "they do not belong together"
        )


def load_model(opened: Opened, auto_class: Any = AutoModelForCausalLM, **options: Any) -> Any:
    """Load the model in its own dtype, on the accelerators if there are any; `options` overrides both."""
    defaults = {"dtype": "auto", "device_map": "auto" if torch.accelerator.is_available() else None}
    loading = {**defaults, "use_safetensors": True, "output_loading_info": True, **options}
    model, report = from_pretrained(auto_class, opened.name, "model", opened.trust_remote_code, **loading)
    missing = sorted(report["missing_keys"])
    if missing:
        raise EvalError(f"{opened.name} is incomplete: {len(missing)} tensors are missing, the first is {missing[0]}")
    return model.eval()


def parameter_count(opened: Opened, auto_class: Any = AutoModelForCausalLM) -> int:
    """Return the number of parameters, without loading the weights."""
    with torch.device("meta"):
        model = auto_class.from_config(deepcopy(opened.config), trust_remote_code=opened.trust_remote_code)
    return model.num_parameters()


def from_pretrained(auto_class: Any, name: str, part: str, trust_remote_code: bool, **options: Any) -> Any:
    """Load a part of a model by its Auto class; `EvalError` with one line for any failure."""
    try:
        return auto_class.from_pretrained(**pretrained_arguments(name), trust_remote_code=trust_remote_code, **options)
    except Exception as error:  # the files may be broken in many ways
        reason = failed_load(error, Path(name))
        if "trust_remote_code" in reason and not trust_remote_code:
            message = f"{name} contains code that loading would run: read it, then add --trust-remote-code"
        elif Path(name).is_dir():
            message = f"the {part} of {name} cannot be loaded: {reason}"
        else:
            message = f"{name!r} is not a directory, and its {part} cannot be loaded from the Hub: {reason}"
        raise EvalError(message) from error
