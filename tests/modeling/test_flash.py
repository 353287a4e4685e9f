"""transformers' flash attention path, with slow functions instead of the kernels, which need an accelerator.

Checks the arguments of the kernels: heads, causality, window, and unpadded sequences. `tests/gpu_check.py` runs the
kernels themselves.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import modeling_flash_attention_utils as library

from tiers import first, grid
from toys import CASES, mixed_model, tokens

DISPATCHED = [case for case in CASES if "talking" not in case]
calls: list[str] = []


def reference_attention(
    q: Any, k: Any, v: Any, causal: bool, scale: float | None, window: tuple[int, int]
) -> torch.Tensor:
    """Return attention of (T, H, d) queries over (S, h, d) keys; the last query is aligned with the last key."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    logits = torch.einsum("thd,shd->hts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    distance = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0] - torch.arange(k.shape[0])
    hidden = (distance < 0) if causal else torch.zeros_like(distance, dtype=torch.bool)
    if window[0] >= 0:
        hidden = hidden | (distance > window[0])
    weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v)


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
) -> torch.Tensor:
    """Stand-in for flash_attn's function for batches of equal length, (B, T, H, d)."""
    calls.append("dense")
    return torch.stack(
        [reference_attention(*row, causal, softmax_scale, window_size) for row in zip(q, k, v, strict=True)]
    )


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
) -> torch.Tensor:
    """Stand-in for flash_attn's function for concatenated sequences of any length, (total tokens, H, d)."""
    calls.append("ragged")
    queries, keys = (ends.tolist() for ends in (cu_seqlens_q, cu_seqlens_k))
    parts = []
    for i in range(len(queries) - 1):
        past = slice(keys[i], keys[i + 1])
        parts.append(
            reference_attention(q[queries[i] : queries[i + 1]], k[past], v[past], causal, softmax_scale, window_size)
        )
    return torch.cat(parts)


@pytest.fixture(autouse=True)
def reference_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace flash_attn's functions in transformers by the slow ones."""
    functions = (flash_attn_func, flash_attn_varlen_func, flash_attn_func, library._pad_input, library._unpad_input)
    monkeypatch.setattr(library, "_lazy_imports", lambda *arguments, **options: functions)
    monkeypatch.setattr(library, "_loaded_implementation", None)
    calls.clear()
    yield
    library._loaded_implementation = None


def flash_model(backbone: str, case: str, **changes: Any) -> Any:
    """Return a toy model with flash attention, bypassing the check for an accelerator."""
    model = mixed_model(backbone, CASES[case], **changes)
    model.config._attn_implementation = "flash_attention_2"
    return model


@pytest.mark.oldest
@pytest.mark.parametrize(("case", "backbone"), grid(DISPATCHED, ("Llama", "Qwen2", "Qwen3", "Qwen3Moe"), strength=1))
@torch.no_grad()
def test_flash_attention_agrees_with_eager(case: str, backbone: str) -> None:
    window = {} if backbone == "Llama" else {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    flash, eager = flash_model(backbone, case, **window), mixed_model(backbone, CASES[case], **window)
    ids = tokens()
    assert (flash(ids).logits - eager(ids).logits).abs().max() < 1e-4
    assert set(calls) == {"dense"}
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    difference = flash(ids, attention_mask=mask).logits - eager(ids, attention_mask=mask).logits
    assert difference[mask.bool()].abs().max() < 1e-4
    assert "ragged" in calls
    packed = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]), "use_cache": False}
    assert (flash(ids[:1], **packed).logits - eager(ids[:1], **packed).logits).abs().max() < 1e-4


@pytest.mark.parametrize("case", first(["explicit", *(case for case in DISPATCHED if case != "explicit")]))
def test_flash_attention_generates_and_trains_as_eager(case: str) -> None:
    flash, eager = flash_model("Qwen3", case), mixed_model("Qwen3", CASES[case])
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(flash.generate(tokens(), **options), eager.generate(tokens(), **options))
    for model in (flash, eager):
        model.train()(tokens(), labels=tokens()).loss.backward()
    for parameter, expected in zip(flash.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-3, atol=1e-4)
