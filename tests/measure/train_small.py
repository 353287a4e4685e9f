"""Trains a small stock checkpoint from scratch on the text in the standard library of CPython.

usage: python tests/measure/train_small.py FAMILY OUT [--steps N] [--kv-heads N]

FAMILY is llama, qwen2, qwen3 or qwen3_moe. OUT becomes a checkpoint folder, which also has calibration.txt (the
training text) and evaluation.txt (held-out text). The checkpoint serves to measure the loss of conversions in families
that have no small public checkpoint. The text depends on the version of CPython, and so does the model. A step takes
about 0.3 seconds of one core.
"""

import argparse
import ast
import inspect
import io
import math
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

END = "<|endoftext|>"
NOT_PROSE = {"site-packages", "dist-packages", "test", "tests", "encodings"}
"""Library folders to skip: installed packages, tests, which a system may omit, and tables of characters."""
HELD_OUT = 10
"""Every tenth document is held out for evaluation."""

CONTEXT = 1024
"""Tokens per training step, which reads one window; as long as the calibration windows of a conversion."""
LEARNING_RATE, WARM_UP, DECAY = 4e-3, 0.05, 0.1
BIAS_STD = 1.0
"""Standard deviation of the initial key biases."""
SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
}
EXTRA_SIZES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
}


def prose(source: str) -> Iterator[str]:
    """The docstrings and comments of a module, in order."""
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("#").strip()
        elif token.type == tokenize.STRING and before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            text = ast.literal_eval(token.string)
            if isinstance(text, str):
                yield f"\n{inspect.cleandoc(text)}\n"
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type


def documents() -> list[str]:
    """The help topics of the language, and the docstrings and comments of each module of the standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    modules = [path for path in sorted(library.rglob("*.py")) if not NOT_PROSE.intersection(path.parts)]
    texts = ["\n".join(prose(path.read_text(encoding="utf-8"))).strip() for path in modules]
    return [text for text in (*(topics[name] for name in sorted(topics)), *texts) if text]


def train_tokenizer(texts: list[str], vocabulary: int = SIZES["vocab_size"]) -> Any:
    """Train a byte-level BPE tokenizer, the kind that Llama and Qwen models have."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def new_model(family: str, kv_heads: int) -> Any:
    """A model with random float32 weights."""
    torch.manual_seed(0)
    sizes = SIZES | EXTRA_SIZES[family] | {"num_key_value_heads": kv_heads}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    for name, parameter in model.named_parameters():
        # Published Qwen2 models have large key biases. A short training from zero would leave them near zero, and
        # then a compression method that ignores biases would score as well as one that does not.
        if name.endswith("k_proj.bias"):
            torch.nn.init.normal_(parameter, std=BIAS_STD)
    return model


def rate(done: float) -> float:
    """Factor of the learning rate after the fraction `done` of the steps: linear warmup, then cosine decay to 2%."""
    return min(done / WARM_UP, 0.02 + 0.49 * (1 + math.cos(math.pi * done)))


def train(model: Any, tokens: torch.Tensor, steps: int) -> None:
    """Train on next-token prediction, with one random window of `tokens` (1D) per step."""
    groups: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        groups[parameter.ndim > 1].append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": groups[True], "weight_decay": DECAY}, {"params": groups[False], "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    generator = torch.Generator().manual_seed(0)
    losses: list[float] = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate((step + 1) / steps)
        begin = int(torch.randint(len(tokens) - CONTEXT, (1,), generator=generator))
        window = tokens[begin : begin + CONTEXT].unsqueeze(0)
        loss = model(window, labels=window, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) % 50 == 0:
            print(f"step {len(losses):5} of {steps}, loss {sum(losses[-50:]) / 50:.3f}", flush=True)
    print(f"{len(losses)} steps of {CONTEXT} tokens, loss {sum(losses[-50:]) / len(losses[-50:]):.3f}")


def main() -> None:
    """Train a model, and write the checkpoint folder with both texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=sorted(EXTRA_SIZES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--kv-heads", type=int, default=SIZES["num_key_value_heads"])
    options = parser.parse_args()
    texts = documents()
    held_out, training = texts[HELD_OUT - 1 :: HELD_OUT], [t for i, t in enumerate(texts, 1) if i % HELD_OUT]
    tokenizer = train_tokenizer(training)
    tokens = torch.tensor(tokenizer(END.join(training), verbose=False)["input_ids"])
    print(f"{len(texts)} documents, {sum(map(len, texts)):,} characters; {len(tokens):,} tokens to train on")
    model = new_model(options.family, options.kv_heads)
    train(model, tokens, options.steps)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    (options.out / "calibration.txt").write_text("\n\n".join(training), encoding="utf-8")
    (options.out / "evaluation.txt").write_text("\n\n".join(held_out), encoding="utf-8")


if __name__ == "__main__":
    main()
