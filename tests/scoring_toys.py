"""Toy models and data for `crosshead eval --data`."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import toys
from encoder_toys import write_encoder
from toy_tokenizer import toy_tokenizer

WORDS = (40, 61)
"""Range of the token ids in texts; the special tokens w1, w2 and w3 are outside it."""
SENTINEL = 62
"""Id of the first sentinel token of the toy T5."""
COUNT = 24


def texts(count: int = COUNT, seed: int = 1) -> list[str]:
    """Return random texts of 2 to 12 words."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 13, (count,), generator=generator).tolist()
    words = [torch.randint(*WORDS, (length,), generator=generator).tolist() for length in lengths]
    return [" ".join(f"w{word}" for word in words_of_text) for words_of_text in words]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write tab-separated values (.tsv) or JSON lines (any other suffix); return the path."""
    if path.suffix == ".tsv":
        lines = ["\t".join(rows[0]), *("\t".join(map(str, row.values())) for row in rows)]
    else:
        lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def labelled(labels: list[Any], seed: int = 1, **columns: int) -> list[dict[str, Any]]:
    """Return rows with a label and one random text per column; `columns` maps names to seeds."""
    sides = {name: texts(len(labels), column_seed) for name, column_seed in (columns or {"sentence": seed}).items()}
    return [
        {name: side[index] for name, side in sides.items()} | {"label": labels[index]} for index in range(len(labels))
    ]


def classes(count: int, of: int, seed: int = 2) -> list[int]:
    """Return `count` random labels from 0 to `of` - 1."""
    return torch.randint(of, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def write_classifier(folder: Path, backbone: str = "Bert", seed: int = 0, **changes: Any) -> Path:
    """Save a stock sequence classifier whose predictions vary between texts; return its folder."""
    write_encoder(folder, backbone, "ForSequenceClassification", **changes)
    backend = toy_tokenizer().backend_tokenizer
    template = {"single": "w1 $A w2", "pair": "w1 $A w2 $B:1 w2:1", "special_tokens": [("w1", 1), ("w2", 2)]}
    backend.post_processor = TemplateProcessing(**template)
    names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=names)
    tokenizer.save_pretrained(folder)
    model = getattr(transformers, f"{backbone}ForSequenceClassification").from_pretrained(folder)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        model.classifier.weight.copy_(torch.randn(model.classifier.weight.shape, generator=generator))
        inputs = [tokenizer(text, return_tensors="pt")["input_ids"][:, :8] for text in texts()]
        model.classifier.bias -= torch.cat([model.eval()(input_ids=token_ids).logits for token_ids in inputs]).mean(0)
    model.save_pretrained(folder)
    return folder


def write_decoder_classifier(model: Any, folder: Path) -> Path:
    """Save a decoder for sequence classification with the toy tokenizer; return its folder."""
    model.save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return folder


def write_masked(folder: Path, backbone: str = "Bert", **changes: Any) -> Path:
    """Save a stock masked language model whose mask token is w3; return its folder."""
    write_encoder(folder, backbone, **changes)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_special_tokens({"mask_token": "w3"})
    tokenizer.save_pretrained(folder)
    return folder


def write_t5(folder: Path, model: Any = None) -> Path:
    """Save a T5 with a vocabulary of 100, whose last tokens are sentinels; return its folder."""
    (toys.stock_model("T5", vocab_size=100) if model is None else model).save_pretrained(folder)
    tokenizer = toy_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    tokenizer.add_tokens([f"<extra_id_{index}>" for index in range(100 - SENTINEL)], special_tokens=True)
    tokenizer.save_pretrained(folder)
    return folder


def write_prose(path: Path, count: int = 700, seed: int = 3) -> Path:
    """Write a text of random words; return its path."""
    words = torch.randint(*WORDS, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    path.write_text(" ".join(f"w{word}" for word in words), encoding="utf-8")
    return path


def write_class_folders(folder: Path, names: list[str], each: int = 4) -> Path:
    """Save random images of 20 x 12 pixels, one subfolder per class; return the folder."""
    generator = torch.Generator().manual_seed(1)
    for name in names:
        (folder / name).mkdir(parents=True)
        for index in range(each):
            pixels = torch.randint(256, (12, 20, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(folder / name / f"{index}.png")
    return folder
