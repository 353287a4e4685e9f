"""torch.compile with fullgraph gives the same loss and gradients as eager execution."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tiers import first
from toys import CASES, mixed_model, tokens

PAIRS = [
    ("Llama", "explicit+talking+mixture"),
    ("Qwen3", "knocking+explicit+differential"),
    *(("Llama", case) for case in CASES if case != "explicit+talking+mixture"),
    ("Qwen3", "explicit"),
    ("Qwen3Moe", "mixture"),
]
"""Backbone and case; the first two pairs together use every mechanism."""

pytestmark = pytest.mark.compile


@pytest.fixture(autouse=True)
def _reset_compiler() -> Iterator[None]:
    yield
    torch.compiler.reset()


def inputs() -> dict[str, torch.Tensor]:
    """Return padded sequences with labels and `num_items_in_batch`, as a training loop passes them."""
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    items = labels[:, 1:].ne(-100).sum() + 3
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "num_items_in_batch": items}


def loss_and_grads(model: Any, call: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of one call."""
    loss = call(**inputs(), use_cache=False).loss
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), gradients


def check_compiled_model(backbone: str, case: str, backend: str, **changes: Any) -> None:
    """Compile a model before its first call; compare it with an uncompiled one, and with itself uncompiled after."""
    model, plain = (mixed_model(backbone, CASES[case], backend=None, **changes).train() for _ in range(2))
    if backbone == "Qwen3Moe":
        for candidate in (model, plain):
            candidate.set_experts_implementation("batched_mm")  # traceable in every supported transformers version
    compiled = loss_and_grads(model, torch.compile(model, fullgraph=True, backend=backend))
    torch.testing.assert_close(compiled, loss_and_grads(plain, plain), rtol=1e-5, atol=3e-6)  # summed in another order
    torch.testing.assert_close(loss_and_grads(model, model), loss_and_grads(plain, plain), rtol=0, atol=0)


@pytest.mark.oldest
@pytest.mark.parametrize("pair", first(PAIRS, 2), ids="-".join)
def test_fullgraph_compile_equals_eager(pair: tuple[str, str]) -> None:
    check_compiled_model(*pair, "aot_eager")


@pytest.mark.parametrize("mode", first(["train", "eval"]))
@pytest.mark.parametrize("case", first(["differential", *(case for case in CASES if case != "differential")]))
def test_fullgraph_compile_works_under_default_device(case: str, mode: str) -> None:
    model = getattr(mixed_model("Llama", CASES[case], backend=None), mode)()
    with torch.device("cpu"):
        loss = torch.compile(model, fullgraph=True, backend="eager")(**inputs(), use_cache=False).loss
    torch.testing.assert_close(loss, model(**inputs(), use_cache=False).loss)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ and finds no g++")
def test_inductor_code_equals_eager() -> None:
    check_compiled_model("Llama", "explicit+talking+mixture", "inductor", num_hidden_layers=1)
