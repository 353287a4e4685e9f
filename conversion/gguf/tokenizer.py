"""Converts the tokenizer of a model to GGUF metadata for llama.cpp.

Two kinds can be written: byte-level BPE (`gpt2`), and the BPE of SentencePiece with byte fallback (`llama`).
llama.cpp implements the pre-tokenisers of byte-level BPE in its own code: the file contains only the name of one.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models

from crosshead.common.checked_json import quoted
from crosshead.common.errors import ConversionError

from .config import TOKENS
from .metadata import Metadata

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""Token types, numbered as in `gguf.TokenType`."""
_CASED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
_GPT2 = _BYTES | {"use_regex": True}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


PRE_TOKENISERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_GPT2],
    "smollm": [{"type": "Digits", "individual_digits": True}, _GPT2],
    "llama-bpe": [_split(_CASED + r"\p{N}{1,3}" + _REST), _BYTES],
    "qwen2": [_split(_CASED + r"\p{N}" + _REST), _BYTES],
}
"""Value of `tokenizer.ggml.pre` -> the pre-tokenisers in tokenizer.json that llama.cpp implements under this name."""
_TRIM = "trim_offsets"
"""A field of pre-tokenisers that changes only offsets, not tokens: it is ignored when they are compared."""
SPACE = "\u2581"
TEMPLATE = "tokenizer.chat_template"
"""Metadata key of the default chat template. A named template has the key `tokenizer.chat_template.NAME`."""
_SPECIAL = TOKENS | {"tokenizer.ggml.unknown_token_id": "unk_token_id"}
"""Metadata key of a special token -> attribute of the tokenizer with its id."""


def tokenizer_metadata(tokenizer: Any, config: Any, name: str) -> Metadata:
    """Return the GGUF metadata of a tokenizer; `ConversionError` if llama.cpp would tokenise differently."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _refused(name, "is not one of the tokenizers library")
    content = json.loads(backend.to_str())
    model = content["model"]
    if model["type"] != "BPE":
        raise _refused(name, f"is of the type {model['type']}")
    kind = _sentencepiece(content, name) if model["byte_fallback"] else _byte_level(content, name)
    tokens, types = _vocabulary(content, tokenizer, config.vocab_size, name)
    if model["byte_fallback"]:
        kind["tokenizer.ggml.scores"] = _scores(tokens, model["merges"])
    else:
        kind["tokenizer.ggml.merges"] = [" ".join(pair) for pair in model["merges"]]
    ids = {key: getattr(tokenizer, field) for key, field in _SPECIAL.items()}
    ids |= {key: getattr(config, field) for key, field in TOKENS.items() if ids[key] is None}
    return {
        **kind,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        **{key: value for key, value in ids.items() if isinstance(value, int) and 0 <= value < config.vocab_size},
        **_added(tokenizer, ids, name),
        **_templates(tokenizer.chat_template),
    }


def pre_tokeniser(name: str) -> Any:
    """Return the pre-tokeniser with this GGUF name as an object of the tokenizers library; None if it is unknown."""
    if name not in PRE_TOKENISERS:
        return None
    content = json.loads(Tokenizer(models.BPE()).to_str())
    parts = [part | {_TRIM: True} if part["type"] == "ByteLevel" else part for part in PRE_TOKENISERS[name]]
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts} if len(parts) > 1 else parts[0]
    return Tokenizer.from_str(json.dumps(content)).pre_tokenizer


def further_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates other than the default one, by name."""
    texts = {name: metadata.get(f"{TEMPLATE}.{name}") for name in metadata.get(f"{TEMPLATE}s", ())}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def correct_tokens(path: Path, metadata: Mapping[str, Any]) -> None:
    """Correct the special tokens in a tokenizer.json that transformers made from a GGUF file with this metadata.

    transformers adds `<|endoftext|>` if it is missing, and encodes a space in an added token as byte-level BPE does.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary, tokens = content["model"]["vocab"], metadata["tokenizer.ggml.tokens"]
    names = {index: name for name, index in vocabulary.items()}
    merged = {"".join(pair) for pair in content["model"]["merges"]}
    added = {token["id"]: token for token in content["added_tokens"] if token["id"] < len(tokens)}
    for index, (token, kind) in enumerate(zip(tokens, metadata.get("tokenizer.ggml.token_type", ()), strict=False)):
        if kind in (_CONTROL, _USER_DEFINED) and index not in added and names.get(index) not in merged:
            vocabulary.pop(names.get(index), None)
            vocabulary[token] = index
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added[index] = {"id": index, "content": token, **flags, "special": kind == _CONTROL}
    content["added_tokens"] = [added[index] for index in sorted(added)]
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")


def _byte_level(content: Mapping[str, Any], name: str) -> Metadata:
    normaliser = content["normalizer"]
    if normaliser not in (None, {"type": "NFC"}):
        raise _refused(name, f"has the normaliser {quoted(normaliser)}")
    parts = _flat(content["pre_tokenizer"])
    known = next((key for key, expected in PRE_TOKENISERS.items() if parts == expected), None)
    if known is None:
        raise _refused(name, f"has a pre-tokeniser other than {', '.join(PRE_TOKENISERS)}: {quoted(parts)}")
    _check_bpe(content, known, name)
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": known, "tokenizer.ggml.add_space_prefix": False}


def _check_bpe(content: Mapping[str, Any], pre: str, name: str) -> None:
    """Raise `ConversionError` for settings of byte-level BPE that GGUF cannot express."""
    model, added = content["model"], {token["content"] for token in content["added_tokens"]}
    for key in ("end_of_word_suffix", "continuing_subword_prefix", "dropout"):
        if model.get(key):
            raise _refused(name, f"has {key}={quoted(model[key])}")
    merged, ignores = {"".join(pair) for pair in model["merges"]}, bool(model.get("ignore_merges"))
    unmerged = (token for token in model["vocab"] if len(token) > 1 and token not in merged and token not in added)
    # llama.cpp looks whole words up in the vocabulary for this pre-tokeniser alone
    if ignores != (pre == "llama-bpe") and (token := next(unmerged, None)) is not None:
        raise _refused(name, f"has ignore_merges={ignores} with the pre-tokeniser {pre} and the token {quoted(token)}")


def _flat(part: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the pre-tokenisers of nested sequences as one list, without `trim_offsets`."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for nested in part["pretokenizers"] for step in _flat(nested)]
    return [{key: value for key, value in part.items() if key != _TRIM}]


def _sentencepiece(content: Mapping[str, Any], name: str) -> Metadata:
    """Return the metadata of the BPE of SentencePiece.

    A normaliser or a pre-tokeniser replaces spaces by U+2581, and may also put a U+2581 in front of the text.
    """
    normaliser = content["normalizer"]
    steps = normaliser["normalizers"] if normaliser and normaliser["type"] == "Sequence" else [normaliser]
    parts = _flat(content["pre_tokenizer"])
    spaced = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prefix = {"type": "Prepend", "prepend": SPACE}
    if parts == [] and steps in ([prefix, spaced], [spaced]):
        has_prefix = prefix in steps
    elif (
        steps == [None]
        and [part["type"] for part in parts] == ["Metaspace"]
        and not parts[0].get("split", True)
        and parts[0]["replacement"] == SPACE
    ):
        has_prefix = parts[0]["prepend_scheme"] != "never"
    else:
        raise _refused(name, f"has the normaliser {quoted(normaliser)} and the pre-tokenisers {quoted(parts)}")
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.add_space_prefix": has_prefix,
    }


def _vocabulary(content: Mapping[str, Any], tokenizer: Any, size: int, name: str) -> tuple[list[str], list[int]]:
    """Return the tokens and their types, one for each row of the embedding."""
    model = content["model"]
    ids: dict[str, int] = model["vocab"] | {token["content"]: token["id"] for token in content["added_tokens"]}
    if max(ids.values()) >= size:
        raise _refused(name, f"has the token {max(ids.values())}, but the model's vocabulary ends at {size - 1}")
    tokens, types = [f"[PAD{index}]" for index in range(size)], [_UNUSED] * size
    for token, index in ids.items():
        tokens[index], types[index] = token, _NORMAL
    if model["byte_fallback"]:
        for index in (model["vocab"].get(f"<0x{byte:02X}>") for byte in range(256)):
            if index is None:
                raise _refused(name, "has no tokens for some bytes")
            types[index] = _BYTE
    for token in content["added_tokens"]:
        if flags := [flag for flag in ("lstrip", "rstrip", "single_word") if token.get(flag)]:
            raise _refused(name, f"has the added token {quoted(token['content'])} with {flags[0]}")
        types[token["id"]] = _CONTROL if token["special"] else _USER_DEFINED
    if model["byte_fallback"] and tokenizer.unk_token_id is not None:
        types[tokenizer.unk_token_id] = _UNKNOWN
    return tokens, types


def _scores(tokens: Sequence[str], merges: Sequence[Sequence[str]]) -> list[float]:
    """Return token scores that encode the order of the merges.

    llama.cpp first merges the pair whose result has the highest score. Tokens that no merge produces come last.
    """
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    return [-float(ranks.get(token, len(merges) + index)) for index, token in enumerate(tokens)]


def _added(tokenizer: Any, ids: Mapping[str, Any], name: str) -> Metadata:
    """Return the metadata on adding BOS and EOS to a text; refuse a tokenizer that adds other tokens."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    complete = tokenizer("a")["input_ids"]
    bos, eos = ids["tokenizer.ggml.bos_token_id"], ids["tokenizer.ggml.eos_token_id"]
    for start, end in ((False, False), (True, False), (False, True), (True, True)):
        if complete == [bos] * start + plain + [eos] * end:
            return {"tokenizer.ggml.add_bos_token": start, "tokenizer.ggml.add_eos_token": end}
    raise _refused(name, f"adds other tokens than BOS and EOS to a text: {quoted(complete)} for {quoted(plain)}")


def _templates(templates: str | Mapping[str, str] | None) -> Metadata:
    """Return the metadata of the default chat template and of the named ones."""
    if templates is None:
        return {}
    if isinstance(templates, str):
        return {TEMPLATE: templates}
    others = {re.sub(r"[^A-Za-z0-9]", "_", key): text for key, text in templates.items() if key != "default"}
    keys: Metadata = {TEMPLATE: templates["default"]} if "default" in templates else {}
    if others:
        keys[f"{TEMPLATE}s"] = sorted(others)
    return keys | {f"{TEMPLATE}.{key}": text for key, text in others.items()}


def _refused(name: str, fault: str) -> ConversionError:
    return ConversionError(
        f"the tokenizer of {name} {fault}, which a GGUF file cannot hold: fold it to a folder instead"
    )
