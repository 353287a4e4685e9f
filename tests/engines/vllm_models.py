"""Small models with mechanisms, and the greedy tokens and log-probabilities that transformers computes for them."""

import json
from pathlib import Path
from typing import Any

import torch

from crosshead.modeling import BACKBONES

BACKBONES_BY_NAME = {config.model_type.removeprefix("crosshead_"): config for config in BACKBONES}
SHAPE = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
PROMPTS = [[1, 17, 200, 5, 99], [1, 3], [1, *range(40, 75)], [1, 250, 250, 8, 12, 77, 31, 140]]
NEW_TOKENS = 12
FEWER = {"key_heads": 1, "value_heads": 1}
ROUTED: dict[str, Any] = {"active_heads": 3, "shared_heads": 1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "knocking-linear": ("llama", {"knocking": {"form": "linear", "on": ["query", "key", "value"]}}),
    "knocking-mlp": ("qwen3", {"knocking": {"form": "mlp", "on": ["query", "key", "value"]}}),
    "knocking-gate": ("qwen2", {"knocking": {"form": "gate"}}),
    "explicit-norm-llama": ("llama", {"explicit": {"norm": True}}),
    "explicit-fewer-llama": ("llama", {"explicit": {"norm": False, **FEWER}}),
    "explicit-fewer-qwen2": ("qwen2", {"explicit": {"norm": True, **FEWER}}),
    "explicit-fewer-qwen3": ("qwen3", {"explicit": {"norm": False, **FEWER}}),
    "explicit-norm-qwen3": ("qwen3", {"explicit": {"norm": True}}),
    "mixture-two-stage": ("llama", {"mixture": ROUTED}),
    "mixture-query-norm": ("qwen3", {"mixture": {**ROUTED, "router": "query_norm", "gate": "binary"}}),
    "knocking-mixture": ("llama", {"knocking": {"form": "mlp"}, "mixture": ROUTED}),
    "gating": ("llama", {"gating": {}}),
    "paired-queries": ("llama", {"differential": {"version": 2}}),
}
SPLIT = ("knocking-linear", "knocking-mlp", "mixture-two-stage", "knocking-mixture", "paired-queries")
"""Cases that also run with tensor parallelism."""
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "talking": ("llama", {"talking": {}}),
    "differential": ("llama", {"differential": {}}),
}
"""Models that vLLM must reject with a message."""


def write_model(name: str, folder: Path) -> None:
    """Write a model with random weights and, for a case in CASES, `expected.json`."""
    backbone, mixers = (CASES | REFUSED)[name]
    torch.manual_seed(0)
    config = BACKBONES_BY_NAME[backbone](**SHAPE, mixers=mixers)
    model: Any = BACKBONES[type(config)][1](config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter += torch.randn_like(parameter) * (0.3 if ".mixers." in parameter_name else 0.08)
    model.save_pretrained(folder)
    if name in CASES:
        (folder / "expected.json").write_text(json.dumps([expected(model, prompt) for prompt in PROMPTS]))


@torch.no_grad()
def expected(model: Any, prompt: list[int]) -> dict[str, Any]:
    """The greedy tokens after a prompt, and the log-probabilities of all prompt and new tokens except the first."""
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
    logprobs = model(ids).logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
    return {"prompt": prompt, "tokens": ids[0, len(prompt) :].tolist(), "logprobs": logprobs.tolist()}
