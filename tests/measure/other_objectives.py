"""Encoders and T5 from scratch at toy size, with each mechanism and without, over several seeds.

usage: PYTHONPATH=tests:tests/measure python -P tests/measure/other_objectives.py OUT.json [--steps 1000] [--seeds 3]

Three objectives: BERT predicts masked tokens (15%, of which 80% are masked and 10% replaced), T5 predicts spans of 3
tokens on average that were cut out (15%), both of the prose that this CPython carries, and ViT classifies the digits
of scikit-learn. Models of one seed see the same examples in the same order. A tenth of the documents and a fifth of
the images are held out; losses there are in nats per predicted token or image, with the same masks for all models.
A stopped command goes on with the next model if it is started again with the same options.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from from_scratch import BASELINE, lines, report
from sklearn.datasets import load_digits
from torch import Tensor, nn
from train_small import documents, train_tokenizer
from transformers import get_linear_schedule_with_warmup

import crosshead

CASES: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "knocking": {"knocking": {}},
    "explicit": {"explicit": {}},
    "talking": {"talking": {}},
    "mixture, 75%": {"mixture": {"active_heads": 6, "shared_heads": 2}},
    "differential": {"differential": {"half_values": True}},
    "gating": {"gating": {}},
    "bilinear": {"bilinear": {}},
}
LENGTH, BATCH, RATE, WARMUP = 64, 32, 1e-3, 0.1
MASKED, MEAN_SPAN = 0.15, 3
VOCABULARY = 512
"""Tokens: with 4,096, a BERT of this size learns hardly more than how often each token occurs."""
SENTINELS = 8
"""Tokens that stand for the spans of a sequence, and one for their end."""
HELD_OUT_EXAMPLES = 512
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
}
T5_SIZES: dict[str, Any] = {
    "d_model": 64,
    "d_kv": 8,
    "d_ff": 256,
    "num_layers": 2,
    "num_heads": 8,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
Examples = Iterator[dict[str, Tensor]]


@dataclass(frozen=True)
class Objective:
    """What a model learns."""

    model: Callable[[dict[str, Any]], nn.Module]
    """From `mixers`."""
    examples: Callable[[bool, torch.Generator, int], Examples]
    """Batches of held-out examples or of the others: (held out, draws, how many)."""


def text_tokens() -> tuple[Tensor, Tensor, int]:
    """The tokens of documents to learn from and of held-out ones, and the size of the vocabulary."""
    texts = documents()
    tokenizer = train_tokenizer(texts, VOCABULARY)
    parts = (texts[len(texts) // 10 :], texts[: len(texts) // 10])
    learnt, held_out = (torch.tensor([t for text in part for t in tokenizer(text)["input_ids"]]) for part in parts)
    return learnt, held_out, len(tokenizer)


def windows(tokens: Tensor, draws: torch.Generator) -> Tensor:
    """A batch of windows (B, T) at random places."""
    starts = torch.randint(len(tokens) - LENGTH, (BATCH, 1), generator=draws)
    return tokens[starts + torch.arange(LENGTH)]


def masked(tokens: Tensor, vocabulary: int, draws: torch.Generator) -> dict[str, Tensor]:
    """Windows with masked tokens; the mask is the token after the vocabulary."""
    chosen = torch.rand(tokens.shape, generator=draws) < MASKED
    how = torch.rand(tokens.shape, generator=draws)
    random = torch.randint(vocabulary, tokens.shape, generator=draws)
    shown = torch.where(how < 0.8, vocabulary, torch.where(how < 0.9, random, tokens))
    labels = tokens.masked_fill(~chosen, -100)
    return {"input_ids": torch.where(chosen, shown, tokens), "labels": labels}


def pieces(total: int, count: int, draws: torch.Generator) -> list[int]:
    """The lengths of `count` pieces of at least one token each."""
    cuts = torch.randperm(total - 1, generator=draws)[: count - 1].sort().values + 1
    edges = [0, *cuts.tolist(), total]
    return [stop - start for start, stop in pairwise(edges)]


def corrupted(tokens: Tensor, vocabulary: int, draws: torch.Generator) -> dict[str, Tensor]:
    """T5's objective: spans are replaced by sentinels, the labels are the sentinels with their spans."""
    noise = round(tokens.shape[1] * MASKED)
    spans = round(noise / MEAN_SPAN)
    inputs, labels = [], []
    for row in tokens.tolist():
        places = zip(pieces(len(row) - noise, spans, draws), pieces(noise, spans, draws), strict=True)
        rest, shown, asked = row, [], []
        for sentinel, (plain, cut) in enumerate(places, start=vocabulary):
            shown += [*rest[:plain], sentinel]
            asked += [sentinel, *rest[plain : plain + cut]]
            rest = rest[plain + cut :]
        inputs.append(shown + rest)
        labels.append([*asked, vocabulary + spans])
    return {"input_ids": torch.tensor(inputs), "labels": torch.tensor(labels)}


def text_examples(
    texts: tuple[Tensor, Tensor, int], prepare: Callable[..., dict[str, Tensor]]
) -> Callable[[bool, torch.Generator, int], Examples]:
    """Batches of an objective on text."""

    def examples(held_out: bool, draws: torch.Generator, count: int) -> Examples:
        for _ in range(count):
            yield prepare(windows(texts[held_out], draws), texts[2], draws)

    return examples


def digits(held_out: bool, draws: torch.Generator, count: int) -> Examples:
    """Batches of images (B, 1, 8, 8), and their classes."""
    pixels, classes = (torch.tensor(each) for each in load_digits(return_X_y=True))
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    chosen = order[: len(order) // 5] if held_out else order[len(order) // 5 :]
    for batch in range(count):
        rows = chosen[torch.randint(len(chosen), (BATCH,), generator=draws)]
        if held_out:
            rows = chosen[batch * BATCH : (batch + 1) * BATCH]
        if len(rows):
            yield {"pixel_values": pixels[rows].float().view(-1, 1, 8, 8) / 8 - 1, "labels": classes[rows]}


def objectives() -> dict[str, Objective]:
    """By name."""
    texts = text_tokens()

    def bert(mixers: dict[str, Any]) -> nn.Module:
        config = crosshead.CrossheadBertConfig(**SIZES, vocab_size=texts[2] + 1, mixers=mixers)
        return crosshead.CrossheadBertForMaskedLM(config)

    def t5(mixers: dict[str, Any]) -> nn.Module:
        config = crosshead.CrossheadT5Config(**T5_SIZES, vocab_size=texts[2] + SENTINELS, mixers=mixers)
        return crosshead.CrossheadT5ForConditionalGeneration(config)

    def vit(mixers: dict[str, Any]) -> nn.Module:
        image = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
        config = crosshead.CrossheadViTConfig(**SIZES, **image, mixers=mixers)
        return crosshead.CrossheadViTForImageClassification(config)

    return {
        "masked tokens, BERT": Objective(bert, text_examples(texts, masked)),
        "cut spans, T5": Objective(t5, text_examples(texts, corrupted)),
        "digits, ViT": Objective(vit, digits),
    }


def trained(objective: Objective, mixers: dict[str, Any], seed: int, steps: int) -> dict[str, float]:
    """The held-out loss of a model that has been trained, and the part of right predictions."""
    torch.manual_seed(seed)
    model = objective.model(mixers).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = get_linear_schedule_with_warmup(optimizer, round(WARMUP * steps), steps)
    for batch in objective.examples(False, torch.Generator().manual_seed(seed), steps):
        model(**batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return score(objective, model.eval())


@torch.no_grad()
def score(objective: Objective, model: nn.Module) -> dict[str, float]:
    """Loss without those of mechanisms, and accuracy, on held-out examples."""
    total, right, count = 0.0, 0, 0
    for batch in objective.examples(True, torch.Generator().manual_seed(1), HELD_OUT_EXAMPLES // BATCH):
        logits, labels = model(**batch).logits.flatten(0, -2), batch["labels"].flatten()
        total += float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
        right += int((logits.argmax(-1) == labels).sum())
        count += int(labels.ne(-100).sum())
    return {"loss": total / count, "accuracy": right / count}


def unfinished(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What an earlier run with the same settings has written, by objective."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: each for name, each in found.items() if settings.items() <= each.items()}


def summary(scores: dict[str, dict[str, dict[str, float]]], settings: dict[str, Any]) -> dict[str, Any]:
    """The report of an objective from the scores of each case and seed."""
    losses = {case: {int(seed): each["loss"] for seed, each in seeds.items()} for case, seeds in scores.items()}
    found = report(losses, CASES, settings)
    for case, seeds in scores.items():
        found["losses"][case]["accuracy"] = mean(each["accuracy"] for each in seeds.values())
    return found | {"scores": scores}


def main() -> None:
    """Train, an objective after the other, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    settings = {
        "steps": asked.steps,
        "batch": BATCH,
        "length": LENGTH,
        "learning_rate": RATE,
        "vocabulary": VOCABULARY,
    }
    found = unfinished(asked.out, settings)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    for name, objective in objectives().items():
        scores: dict[str, dict[str, dict[str, float]]] = found.get(name, {}).get("scores", {})
        for seed, case in product(map(str, range(asked.seeds)), CASES):
            if seed in scores.setdefault(case, {}):
                continue
            scores[case][seed] = trained(objective, CASES[case], int(seed), asked.steps)
            print(f"{name}, seed {seed}, {case}: {scores[case][seed]}", flush=True)
            found[name] = summary(scores, settings)
            asked.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        print("\n".join([name, *lines(found[name])]))


if __name__ == "__main__":
    main()
