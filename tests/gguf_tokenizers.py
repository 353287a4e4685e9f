"""Toy tokenizers of the types that a GGUF file supports."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import toys
from toy_checkpoints import CHARACTERS, write_model

MIXERS = {"knocking": {"form": "linear", "on": ["query", "key", "value"]}}
VOCABULARY = 320
"""Rows of the embedding: more than any toy tokenizer has tokens."""
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
SPACE = "\u2581"
MERGES = [("l", "o"), ("lo", "w"), ("e", "r"), ("1", "2"), ("12", "3"), ("t", "h"), ("th", "e"), ("i", "n")]


def byte_level(split: str | None) -> Any:
    """Return the byte-level pre-tokenizer, without its own regex if `split` has done the splitting."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)


def split_before(pattern: str) -> Any:
    """Return a pre-tokenizer that splits by a regex before bytes, like Llama 3 and Qwen2."""
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level(pattern)])


PRE: dict[str, Any] = {
    "gpt-2": byte_level(None),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level(None)]),
    "llama-bpe": split_before(LLAMA3),
    "qwen2": split_before(QWEN2),
}
"""Pre-tokenizers, by GGUF's `tokenizer.ggml.pre` name."""


def bpe(pre: str = "gpt-2", **settings: Any) -> Any:
    """Return byte-level BPE with all bytes, a few merges and two special tokens."""
    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [*MERGES, ("\u0120", "low"), ("\u0120", "1"), ("\u0120", "\u0120"), ("\u010a", "\u010a")]
    words += ["".join(pair) for pair in merges]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = PRE[pre], decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return _finished(tokenizer, **settings)


def characters() -> Any:
    """Return byte-level BPE without merges, with the same ids as `character_tokenizer`."""
    spelled = {" ": "\u0120", "\n": "\u010a"}
    words = ["<unknown>", *(spelled.get(character, character) for character in CHARACTERS[:60])]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level(None), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<unknown>", unk_token="<unknown>")


def sentencepiece(prefix: str = "Metaspace", **settings: Any) -> Any:
    """Return BPE with byte fallback and U+2581 for spaces, set by a pre-tokenizer or by normalizers."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [*MERGES, (SPACE, "low"), (SPACE, "t"), (SPACE, "the")]
    results = ["".join(pair) for pair in merges]
    words += [*results, SPACE, *sorted(set("".join(results)) - {SPACE})]
    ids = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    if prefix == "Metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    else:
        steps = [normalizers.Prepend(SPACE)] * (prefix == "Prepend") + [normalizers.Replace(" ", SPACE)]
        tokenizer.normalizer = normalizers.Sequence(steps)
    return _finished(tokenizer, unk_token="<unk>", **settings)


def _finished(tokenizer: Tokenizer, **settings: Any) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", **settings)


def write_mixed(folder: Path, backbone: str = "Llama", tokenizer: Any = None, **changes: Any) -> Path:
    """Save a crosshead model with linear `knocking` maps and a tokenizer that GGUF supports; return its folder."""
    changes = {"vocab_size": VOCABULARY} | ({"norm_topk_prob": True} if backbone == "Qwen3Moe" else {}) | changes
    dtype = changes.pop("dtype", None)
    model = toys.mixed_model(backbone, MIXERS, **changes)
    write_model(model, folder, **({} if dtype is None else {"dtype": dtype}))
    (tokenizer or bpe()).save_pretrained(folder)
    return folder


def edit_tokenizer(folder: Path, **changes: Any) -> None:
    """Replace top-level fields of tokenizer.json."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")
