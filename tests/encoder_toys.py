"""Toy encoder checkpoints on disk."""

import transformers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import toys
from toy_tokenizer import toy_tokenizer

WORDS = " ".join(f"w{3 + 7 * index % 58}" for index in range(4000))


def write_encoder(folder, backbone="Bert", task="ForMaskedLM", **changes):
    """Save a stock encoder with a tokenizer that adds w1 before and w2 after a text; return its folder."""
    config = toys.stock_config(backbone, **changes)
    model = toys.lopsided(getattr(transformers, f"{backbone}{task}")(config))
    model.save_pretrained(folder)
    tokenizer = toy_tokenizer().backend_tokenizer
    template = {"single": "w1 $A w2", "special_tokens": [("w1", 1), ("w2", 2)]}
    tokenizer.post_processor = TemplateProcessing(**template)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, cls_token="w1", sep_token="w2").save_pretrained(folder)
    (folder.parent / "words.txt").write_text(WORDS)
    return folder
