"""Trains toy encoders and T5 models from scratch, with each mechanism and without, over several seeds.

usage: PYTHONPATH=tests:tests/measure python -P tests/measure/other_objectives.py OUT.json [--steps 1000] [--seeds 3]

There are three objectives. BERT predicts selected tokens (15%, of which 80% are masked and 10% replaced), and T5
predicts removed spans (15% of the tokens, 3 per span on average), both on the prose in the standard library of this
CPython; ViT classifies the digits of scikit-learn. Models with the same seed see the same examples in the same order.
A tenth of the documents and a fifth of the images are held out. Held-out losses are in nats per predicted token or
image, with the same masks for all models. The same command resumes a stopped run with the next model.
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
"""Number of tokens. With 4,096, a BERT of this size learns little more than the frequency of each token."""
SENTINELS = 8
"""Number of sentinel tokens: one for each removed span of a sequence, and one for the end of the labels."""
HELD_OUT_EXAMPLES = 512
"""Maximum number of held-out examples."""
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
    """A training objective: model and data."""

    model: Callable[[dict[str, Any]], nn.Module]
    """Creates a model with the given `mixers`."""
    examples: Callable[[bool, torch.Generator, int], Examples]
    """Returns batches; the arguments are: held-out data or training data, random generator, number of batches."""


def text_tokens() -> tuple[Tensor, Tensor, int]:
    """The tokens of the training documents and of the held-out documents, both 1D, and the size of the vocabulary."""
    texts = documents()
    tokenizer = train_tokenizer(texts, VOCABULARY)
    parts = (texts[len(texts) // 10 :], texts[: len(texts) // 10])
    learnt, held_out = (torch.tensor([t for text in part for t in tokenizer(text)["input_ids"]]) for part in parts)
    return learnt, held_out, len(tokenizer)


def windows(tokens: Tensor, draws: torch.Generator) -> Tensor:
    """A batch of windows (B, T) at random positions."""
    starts = torch.randint(len(tokens) - LENGTH, (BATCH, 1), generator=draws)
    return tokens[starts + torch.arange(LENGTH)]


def masked(tokens: Tensor, vocabulary: int, draws: torch.Generator) -> dict[str, Tensor]:
    """Inputs and labels (B, T) of masked language modelling; the id of the mask token is `vocabulary`."""
    chosen = torch.rand(tokens.shape, generator=draws) < MASKED
    how = torch.rand(tokens.shape, generator=draws)
    random = torch.randint(vocabulary, tokens.shape, generator=draws)
    shown = torch.where(how < 0.8, vocabulary, torch.where(how < 0.9, random, tokens))
    labels = tokens.masked_fill(~chosen, -100)
    return {"input_ids": torch.where(chosen, shown, tokens), "labels": labels}


def pieces(total: int, count: int, draws: torch.Generator) -> list[int]:
    """Random lengths of `count` pieces with at least one token each, which add up to `total`."""
    cuts = torch.randperm(total - 1, generator=draws)[: count - 1].sort().values + 1
    edges = [0, *cuts.tolist(), total]
    return [stop - start for start, stop in pairwise(edges)]


def corrupted(tokens: Tensor, vocabulary: int, draws: torch.Generator) -> dict[str, Tensor]:
    """Span corruption of T5: in the inputs, sentinels replace spans; the labels are the sentinels and their spans."""
    noise = round(tokens.shape[1] * MASKED)
    spans = round(noise / MEAN_SPAN)
    inputs, labels = [], []
    for row in tokens.tolist():
        lengths = zip(pieces(len(row) - noise, spans, draws), pieces(noise, spans, draws), strict=True)
        rest, shown, targets = row, [], []
        for sentinel, (plain, cut) in enumerate(lengths, start=vocabulary):
            shown += [*rest[:plain], sentinel]
            targets += [sentinel, *rest[plain : plain + cut]]
            rest = rest[plain + cut :]
        inputs.append(shown + rest)
        labels.append([*targets, vocabulary + spans])
    return {"input_ids": torch.tensor(inputs), "labels": torch.tensor(labels)}


def text_examples(
    texts: tuple[Tensor, Tensor, int], prepare: Callable[..., dict[str, Tensor]]
) -> Callable[[bool, torch.Generator, int], Examples]:
    """The function `Objective.examples` of an objective on text; `prepare` turns windows into inputs and labels."""

    def examples(held_out: bool, draws: torch.Generator, count: int) -> Examples:
        for _ in range(count):
            yield prepare(windows(texts[held_out], draws), texts[2], draws)

    return examples


def digits(held_out: bool, draws: torch.Generator, count: int) -> Examples:
    """Batches of images (B, 1, 8, 8) and their classes (B,), random for training, in order for held-out images."""
    pixels, classes = (torch.tensor(array) for array in load_digits(return_X_y=True))
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    chosen = order[: len(order) // 5] if held_out else order[len(order) // 5 :]
    for batch in range(count):
        rows = chosen[torch.randint(len(chosen), (BATCH,), generator=draws)]
        if held_out:
            rows = chosen[batch * BATCH : (batch + 1) * BATCH]
        if len(rows):
            yield {"pixel_values": pixels[rows].float().view(-1, 1, 8, 8) / 8 - 1, "labels": classes[rows]}


def objectives() -> dict[str, Objective]:
    """Name -> objective."""
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
    """Train a model, and return its held-out loss and accuracy."""
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
    """Loss and accuracy on held-out examples, without the auxiliary losses of mechanisms."""
    total, right, count = 0.0, 0, 0
    for batch in objective.examples(True, torch.Generator().manual_seed(1), HELD_OUT_EXAMPLES // BATCH):
        logits, labels = model(**batch).logits.flatten(0, -2), batch["labels"].flatten()
        total += float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
        right += int((logits.argmax(-1) == labels).sum())
        count += int(labels.ne(-100).sum())
    return {"loss": total / count, "accuracy": right / count}


def unfinished(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Objective -> results that an earlier run with the same settings has written."""
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: result for name, result in results.items() if settings.items() <= result.items()}


def summary(scores: dict[str, dict[str, dict[str, float]]], settings: dict[str, Any]) -> dict[str, Any]:
    """The results of an objective, from case -> seed -> loss and accuracy."""
    losses = {case: {int(seed): score["loss"] for seed, score in seeds.items()} for case, seeds in scores.items()}
    results = report(losses, CASES, settings)
    for case, seeds in scores.items():
        results["losses"][case]["accuracy"] = mean(score["accuracy"] for score in seeds.values())
    return results | {"scores": scores}


def main() -> None:
    """Train all models, objective by objective, and print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    settings = {
        "steps": options.steps,
        "batch": BATCH,
        "length": LENGTH,
        "learning_rate": RATE,
        "vocabulary": VOCABULARY,
    }
    results = unfinished(options.out, settings)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for name, objective in objectives().items():
        scores: dict[str, dict[str, dict[str, float]]] = results.get(name, {}).get("scores", {})
        for seed, case in product(map(str, range(options.seeds)), CASES):
            if seed in scores.setdefault(case, {}):
                continue
            scores[case][seed] = trained(objective, CASES[case], int(seed), options.steps)
            print(f"{name}, seed {seed}, {case}: {scores[case][seed]}", flush=True)
            results[name] = summary(scores, settings)
            options.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        print("\n".join([name, *lines(results[name])]))


if __name__ == "__main__":
    main()
