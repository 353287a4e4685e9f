"""Opens a model for evaluation; configuration and tokenizer are checked first."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from crosshead.common.errors import EvalError, one_line

CAUSAL = ("ForCausalLM", "LMHeadModel")
"""How the names of language models end that the library does not list, such as a repository's own."""


@dataclass(frozen=True)
class Opened:
    """A causal language model that can be loaded."""

    name: str
    config: Any
    tokenizer: Any
    trust_remote_code: bool = False

    @property
    def label(self) -> str:
        """The Hub id, or the folder's own name, which says nothing of where it is."""
        return Path(self.name).resolve().name if Path(self.name).is_dir() else self.name


def open_model(name: str, trust_remote_code: bool = False) -> Opened:
    """Find a model, a folder or a Hub id. Code that is not ours runs only with `trust_remote_code`."""
    path = Path(name).expanduser()
    if not path.is_dir() and (path.exists() or name[:1] in ("", ".", "/", "~") or name.count("/") > 1):
        raise EvalError(f"{name!r} is no folder: give the folder of a model, or its name on the Hub")
    if path.is_dir() and not (path / "config.json").is_file():
        raise EvalError(f"{name} has no config.json: give the folder of a model")
    found = str(path) if path.is_dir() else name
    config = _part(AutoConfig, found, "configuration", trust_remote_code)
    _check_kind(name, config)
    tokenizer = _part(AutoTokenizer, found, "tokenizer", trust_remote_code)
    _check_tokenizer(name, tokenizer)
    return Opened(found, config, tokenizer, trust_remote_code)


def load_model(opened: Opened, **options: Any) -> Any:
    """The model, in its own dtype and on the accelerators if there are any, where `options` do not say otherwise."""
    usual = {"dtype": "auto", "device_map": "auto" if torch.accelerator.is_available() else None}
    loading = {**usual, "use_safetensors": True, "output_loading_info": True, **options}
    model, report = _part(AutoModelForCausalLM, opened.name, "model", opened.trust_remote_code, **loading)
    missing = sorted(report["missing_keys"])
    if missing:
        raise EvalError(f"{opened.name} lacks {len(missing)} tensors, {missing[0]} first: it is not complete")
    return model.eval()


def _part(kind: Any, name: str, what: str, trust: bool, **options: Any) -> Any:
    try:
        return kind.from_pretrained(name, trust_remote_code=trust, **options)
    except Exception as error:  # its files may be broken in many ways
        said = one_line(error)
        if "trust_remote_code" in said and not trust:
            told = f"{name} brings code of its own, which loading would run: look at it, then say --trust-remote-code"
        elif Path(name).is_dir():
            told = f"the {what} of {name} cannot be loaded: {said}"
        else:
            told = f"{name!r} is no folder, and its {what} cannot be loaded from the Hub: {said}"
        raise EvalError(told) from error


def _check_kind(name: str, config: Any) -> None:
    """Only a causal language model gives the next token's chances, whatever else the library would load as one."""
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    made = config.architectures or []
    if made and not any(kind in known or kind.endswith(CAUSAL) for kind in made):
        raise EvalError(f"{name} is a {made[0]}, not a causal language model")


def _check_tokenizer(name: str, tokenizer: Any) -> None:
    """Where its files are missing, the library makes an empty one for some models."""
    if not tokenizer.encode("a word", add_special_tokens=False):
        raise EvalError(f"{name} has no tokenizer that knows any words: copy the tokenizer's files into it")
