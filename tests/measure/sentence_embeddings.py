"""Measures the cosines between the sentence embeddings of a converted encoder and of its source.

usage: python -P tests/measure/sentence_embeddings.py MODEL TEXT --out FILE

MODEL is the folder of a BERT whose sentence embeddings are means over tokens, such as all-MiniLM-L6-v2. Conversions
are calibrated on 1,000 sentences of the first half of TEXT, or on the default text, and compared on 500 sentences of
the second half. `talking`, which starts with the outputs of the source, is also trained on the calibration sentences
with the contrastive loss of SimCSE, where dropout gives two embeddings of each sentence. Training changes the
embeddings of any model, so the source is trained in the same way for comparison.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer

import crosshead
from crosshead.evals.bench.machine import machine

CALIBRATION, HELD_OUT, MAX_TOKENS = 1000, 500, 128
WORDS = range(6, 61)
"""Allowed numbers of words per sentence."""
STEPS, BATCH, LEARNING_RATE, TEMPERATURE = 60, 32, 3e-5, 0.05
NEUTRAL: dict[str, dict[str, Any]] = {
    "knocking": {"knocking": {}},
    "talking": {"talking": {}},
    "explicit": {"explicit": {"norm": False}},
    "gating": {"gating": {}},
}


def fewer(part: float, heads: int, **options: Any) -> dict[str, Any]:
    """The mixers of a `mixture` with the fraction `part` of the heads active."""
    return {"mixture": {"active_heads": round(part * heads), **options}}


def cases(heads: int) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Name and mixers of each conversion, and True if it is calibrated on the sentences."""
    yield from ((name, mixers, False) for name, mixers in NEUTRAL.items())
    yield "mixture, 75% of heads", fewer(0.75, heads), False
    yield "mixture, 75% of heads, calibrated on sentences", fewer(0.75, heads), True
    yield "mixture, 50% of heads, calibrated on sentences", fewer(0.5, heads), True
    yield "mixture, 75% of heads, method=paper", fewer(0.75, heads, method="paper"), False


def sentences(text: str) -> tuple[list[str], list[str]]:
    """The first sentences, for calibration, and evenly spaced sentences of the second half, which are held out."""
    lines = [line for line in text.splitlines() if not line.strip().startswith("=")]
    all_sentences = [sentence.strip() for line in lines for sentence in re.split(r"(?<=[.!?]) ", line)]
    all_sentences = [sentence for sentence in all_sentences if len(sentence.split()) in WORDS]
    half = len(all_sentences) // 2
    if half < CALIBRATION:
        raise SystemExit(f"the text has {len(all_sentences)} sentences: give one with at least {2 * CALIBRATION}")
    later = all_sentences[half:]
    return all_sentences[:CALIBRATION], [later[index * len(later) // HELD_OUT] for index in range(HELD_OUT)]


def embeddings(model: Any, tokenizer: Any, texts: list[str]) -> torch.Tensor:
    """The normalised means (B, hidden) of the hidden states of the texts."""
    options = {"padding": True, "truncation": True, "max_length": MAX_TOKENS, "return_tensors": "pt"}
    tokens = tokenizer(texts, **options)
    weights = tokens["attention_mask"].unsqueeze(-1)
    hidden = (model(**tokens).last_hidden_state * weights).sum(1) / weights.sum(1)
    return functional.normalize(hidden, dim=-1)


@torch.no_grad()
def all_embeddings(model: Any, tokenizer: Any, texts: list[str]) -> torch.Tensor:
    """The embeddings (N, hidden) of many texts, computed in batches without gradients and dropout."""
    parts = [texts[start : start + BATCH] for start in range(0, len(texts), BATCH)]
    return torch.cat([embeddings(model.eval(), tokenizer, part) for part in parts])


def train(model: Any, tokenizer: Any, texts: list[str]) -> float:
    """Train all weights for a few steps with the loss of SimCSE; return the last loss."""
    torch.manual_seed(0)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        batch = [texts[(step * BATCH + offset) % len(texts)] for offset in range(BATCH)]
        first, second = (embeddings(model, tokenizer, batch) for _ in range(2))
        loss = functional.cross_entropy(first @ second.T / TEMPERATURE, torch.arange(len(batch)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the cosines")
    options = parser.parse_args()
    calibration, held_out = sentences(options.text.read_text(encoding="utf-8"))
    tokenizer, source = AutoTokenizer.from_pretrained(options.model), AutoModel.from_pretrained(options.model)
    expected = all_embeddings(source, tokenizer, held_out)
    rows: dict[str, dict[str, float]] = {}

    def record(name: str, model: Any, **further: float) -> None:
        vectors = all_embeddings(model, tokenizer, held_out)
        cosines = (vectors * expected).sum(-1)
        rows[name] = {"mean": round(float(cosines.mean()), 5), "minimum": round(float(cosines.min()), 5), **further}
        if name in NEUTRAL:
            rows[name]["difference"] = float((vectors - expected).abs().max())
        print(json.dumps({name: rows[name]}), flush=True)

    record("source, trained on sentences", source, loss=round(train(source, tokenizer, calibration), 5))
    with tempfile.TemporaryDirectory() as folder:
        text, made = Path(folder, "sentences.txt"), Path(folder, "made")
        text.write_text("\n".join(calibration), encoding="utf-8")
        for name, mixers, on_sentences in cases(source.config.num_attention_heads):
            calibration_option = {"calibration": text} if on_sentences else {}
            crosshead.convert(options.model, made, mixers, overwrite=True, verify=False, **calibration_option)
            model = AutoModel.from_pretrained(made)
            record(name, model)
            if name == "talking":
                record("talking, trained on sentences", model, loss=round(train(model, tokenizer, calibration), 5))
    content = {"machine": machine(), "sentences": HELD_OUT, "calibration": CALIBRATION, "steps": STEPS, "cases": rows}
    options.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
