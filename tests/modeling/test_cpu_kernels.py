"""The CPU attention kernels: compared with plain formulas, and their fallback to the stock functions."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from crosshead.modeling.kernels import cpu_explicit, cpu_mixture
from crosshead.modeling.kernels.cpu import is_tracing

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
SCALING = 0.3
MIXTURE: dict[str, dict[str, Any]] = {
    "heads with keys of their own": {"heads": (8, 8), "shared": 2},
    "grouped heads": {"heads": (8, 2), "shared": 3, "batch": 2},
    "no shared heads": {"heads": (4, 4), "shared": 0},
    "more keys than queries, causal": {"sizes": (50, 70)},
    "fewer keys than queries, causal": {"sizes": (70, 50)},
    "not causal": {"sizes": (50, 70), "causal": False, "batch": 2},
    "padding on the left": {"mask": "left", "batch": 2, "heads": (4, 2)},
    "any mask for all sequences": {"mask": "random", "batch": 2, "sizes": (50, 70)},
}
EXPLICIT: dict[str, dict[str, Any]] = {
    "one query": {},
    "a batch": {"batch": 2},
    "a length that parts divide": {"keys": 96},
    "two queries": {"tokens": 2, "mask": "bool"},
    "padding": {"batch": 2, "mask": "bool"},
    "an additive mask": {"batch": 2, "mask": "added"},
    "a bias of each head": {"tokens": 2, "mask": "bias"},
    "heads with keys of their own": {"heads": (4, 4, 2)},
}


@pytest.fixture
def low_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the thresholds so that small calls are eligible."""
    monkeypatch.setattr(cpu_mixture, "MIN_QUERIES", 1)
    monkeypatch.setattr(cpu_mixture, "MAX_FRACTION", 1.0)
    monkeypatch.setattr(cpu_mixture, "BLOCK_ROWS", 8)
    monkeypatch.setattr(cpu_explicit, "MIN_KEYS", 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)


def toy_layer(heads: tuple[int, ...], causal: bool = True) -> Any:
    """Return the attributes of an attention layer that attention functions read."""
    return SimpleNamespace(num_key_value_groups=heads[0] // heads[1], is_causal=causal)


def draw_gates(batch: int, tokens: int, heads: int, shared: int) -> torch.Tensor:
    """Return random gates of 0 or 1 (B, T, H); the last routed head gets no tokens."""
    gates = (torch.rand(batch, tokens, heads) < torch.rand(heads)).float()
    gates[..., -1] = 0
    gates[..., :shared] = 1
    return gates


def draw_mask(kind: str | None, batch: int, tokens: int, keys: int) -> torch.Tensor | None:
    """Return a boolean mask with some rows that hide every key, or None."""
    if kind is None:
        return None
    if kind == "random":
        mask = torch.rand(1, 1, tokens, keys) < 0.2
        mask[:, :, 5] = False
        return mask
    mask = torch.ones(batch, 1, tokens, keys, dtype=torch.bool).tril()
    mask[-1, ..., :20] = False
    return mask


def reference_attention(
    inputs: Sequence[torch.Tensor], visible: torch.Tensor, bias: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """Return attention outputs (B, T, H, d) in float64; zeros for rows without visible keys."""
    query, *cached = inputs
    key, value = (x.double().repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in cached)
    logits = query.double() @ key.transpose(2, 3) * SCALING + bias
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (weights @ value).transpose(1, 2)


@pytest.mark.usefixtures("low_thresholds")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", MIXTURE)
def test_mixture_kernel_equals_dense_attention(case: str, dtype: torch.dtype) -> None:
    """Outputs and gradients equal those of dense attention with outputs of gates 0 zeroed."""
    defaults: dict[str, Any] = {
        "batch": 1,
        "sizes": (70, 70),
        "heads": (4, 4),
        "shared": 1,
        "causal": True,
        "mask": None,
    }
    batch, (tokens, keys), heads, shared, causal, kind = (defaults | MIXTURE[case]).values()
    torch.manual_seed(0)
    shapes = [(batch, heads[0], tokens, 16), *2 * [(batch, heads[1], keys, 16)]]
    inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    mask, gates = draw_mask(kind, batch, tokens, keys), draw_gates(batch, tokens, heads[0], shared)
    assert cpu_mixture.mixture_eligible(*inputs, mask, 0.0, gates, shared, {})
    output, weights = cpu_mixture.mixture_attention(
        toy_layer(heads, causal), *inputs, mask, SCALING, gates=gates, shared_heads=shared, active_heads=2
    )
    visible = torch.ones(tokens, keys, dtype=torch.bool)
    visible = mask if mask is not None else visible.tril() if causal else visible
    expected = reference_attention(inputs, visible) * gates.unsqueeze(-1)
    grad_output = torch.randn_like(expected)
    pairs = [(output, expected)]
    pairs += zip(
        torch.autograd.grad(output, inputs, grad_output.to(dtype)),
        torch.autograd.grad(expected, inputs, grad_output),
        strict=True,
    )
    assert weights is None
    assert not output[gates == 0].any()
    for ours, plain in pairs:
        assert torch.allclose(ours.double(), plain.double(), atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.usefixtures("low_thresholds")
def test_second_derivative_of_mixture_kernel_raises() -> None:
    """Without the error, the second derivative would be wrong."""
    query, key, value = (torch.randn(1, 2, 20, 8, requires_grad=True) for _ in range(3))
    gates = draw_gates(1, 20, 3, 0)[..., :2]
    output = cpu_mixture.mixture_attention(toy_layer((2, 2)), query, key, value, None, SCALING, gates=gates)[0]
    first = torch.autograd.grad(output.square().sum(), query, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="derivative"):
        torch.autograd.grad(first.sum(), query)


UNFIT: dict[str, dict[str, Any]] = {
    "half precision": {"dtype": torch.bfloat16},
    "dropout": {"dropout": 0.1},
    "an additive mask": {"mask": torch.zeros(1, 1, 16, 16)},
    "a mask of each head": {"mask": torch.ones(1, 4, 16, 16, dtype=torch.bool)},
    "gates of other heads": {"gates": torch.zeros(1, 16, 8)},
    "values of another size": {"value_dim": 4},
    "a bias of positions": {"options": {"position_bias": torch.zeros(1, 4, 16, 16)}},
    "most heads of one token": {"gates": torch.ones(1, 16, 4)},
}


def is_mixture_call_eligible(
    dtype: torch.dtype = torch.float32,
    dropout: float = 0.0,
    mask: torch.Tensor | None = None,
    gates: torch.Tensor | None = None,
    value_dim: int = 8,
    options: dict[str, Any] | None = None,
) -> bool:
    """Whether a call with 16 tokens, 4 heads and the given changes is eligible for the kernel."""
    query, key = torch.zeros(2, 1, 4, 16, 8, dtype=dtype)
    value = torch.zeros(1, 4, 16, value_dim, dtype=dtype)
    gates = torch.zeros(1, 16, 4) if gates is None else gates
    return cpu_mixture.mixture_eligible(query, key, value, mask, dropout, gates, 0, options or {})


@pytest.mark.parametrize("case", UNFIT)
def test_mixture_eligible_is_false_for_unsupported_calls(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each condition alone makes a call ineligible."""
    assert not is_mixture_call_eligible()
    monkeypatch.setattr(cpu_mixture, "MIN_QUERIES", 16)
    assert is_mixture_call_eligible()
    assert not is_mixture_call_eligible(**UNFIT[case])
    with torch.autocast("cpu"):
        assert not is_mixture_call_eligible()
    monkeypatch.setattr(cpu_mixture, "flash_kernel", lambda suffix="": None)
    assert not is_mixture_call_eligible()


def test_mixture_falls_back_to_stock_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gates, or if the call is not eligible, the stock function runs."""
    query, key, value = torch.randn(3, 1, 4, 16, 8)
    stock = cpu_mixture.sdpa_attention_forward(toy_layer((4, 4)), query, key, value, None, scaling=SCALING)[0]
    for gates in (None, torch.zeros(1, 16, 4)):
        output = cpu_mixture.mixture_attention(toy_layer((4, 4)), query, key, value, None, SCALING, gates=gates)[0]
        assert torch.equal(output, stock)


def test_is_tracing_detects_func_and_jit_tracing() -> None:
    traced: list[bool] = [is_tracing()]

    def noted(x: torch.Tensor) -> torch.Tensor:
        traced.append(is_tracing())
        return x.sum()

    torch.func.grad(noted)(torch.ones(2))
    torch.jit.trace(noted, torch.ones(2), check_trace=False)
    assert traced == [False, True, True]


@pytest.mark.compile
@pytest.mark.usefixtures("low_thresholds")
def test_compiled_mixture_uses_stock_sdpa() -> None:
    """The compiled call is one graph of the stock function, without the kernel."""
    (query, key, value), module = torch.randn(3, 1, 4, 16, 8), toy_layer((4, 4))

    def attend(gates: torch.Tensor) -> torch.Tensor:
        return cpu_mixture.mixture_attention(module, query, key, value, None, SCALING, gates=gates)[0]

    stock = cpu_mixture.sdpa_attention_forward(module, query, key, value, None, scaling=SCALING)[0]
    compiled = torch.compile(attend, backend="eager", fullgraph=True)(torch.zeros(1, 16, 4))
    assert torch.allclose(compiled, stock, atol=1e-6)


def explicit_call(
    batch: int = 1,
    heads: tuple[int, int, int] = (8, 4, 2),
    tokens: int = 1,
    keys: int = 97,
    mask: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return query, cached components, and options of a call; with a mask and a batch, one sequence has no key."""
    torch.manual_seed(0)
    query_heads, combined, components = heads
    query = torch.randn(batch, query_heads, tokens, 16, dtype=dtype)
    cached = (torch.randn(batch, keys, components, 16, dtype=dtype).transpose(1, 2) for _ in range(2))
    options: dict[str, Any] = {
        f"{side}_map": torch.randn(combined, components, dtype=dtype) for side in ("key", "value")
    }
    visible = torch.rand(batch, 1, tokens, keys) < 0.5
    visible[0, ..., 30:60] = False
    if batch > 1:
        visible[-1] = False
    masks = {
        None: None,
        "bool": visible,
        "added": torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min),
        "bias": torch.randn(batch, query_heads, tokens, keys),
    }
    return [query, *cached], options | {"attention_mask": masks[mask], "scaling": SCALING}


@pytest.mark.usefixtures("low_thresholds")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", EXPLICIT)
def test_explicit_kernel_equals_attention_over_combined_heads(
    case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    (query, *cached), options = explicit_call(**EXPLICIT[case], dtype=dtype)
    monkeypatch.setattr(cpu_explicit, "explicit_attention_forward", None)
    output, weights = cpu_explicit.explicit_attention(toy_layer((8, 4)), query, *cached, **options)
    maps = (options["key_map"], options["value_map"])
    combined = [torch.einsum("ij,bjsd->bisd", *both) for both in zip(maps, cached, strict=True)]
    mask, bias = options["attention_mask"], torch.zeros(())
    visible = torch.ones(1, 1, 1, 1, dtype=torch.bool) if mask is None else mask
    if visible.is_floating_point():
        visible, bias = visible > cpu_explicit.MASKED_LOGIT, visible
    expected = reference_attention([query, *combined], visible, bias)
    sees = visible.any(-1).all(1).expand(len(query), query.shape[2])  # (B, T)
    assert weights is None
    assert output.shape == expected.shape
    assert output.isfinite().all()
    assert torch.allclose(output.double()[sees], expected[sees], atol=10 * TOLERANCE[dtype], rtol=0)


@pytest.mark.usefixtures("low_thresholds")
@pytest.mark.parametrize(
    "case", ("gradients", "half precision", "normed keys", "keys alone", "groups", "another", "busy threads")
)
def test_explicit_falls_back_to_plain_function(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that are not eligible are passed to the plain function."""
    inputs, options = explicit_call(dtype=torch.bfloat16 if case == "half precision" else torch.float32)
    if case == "gradients":
        inputs[0].requires_grad_()
    elif case == "busy threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    elif case != "half precision":
        changes: dict[str, dict[str, Any]] = {
            "normed keys": {"key_scale": torch.ones(1, 4, 97)},
            "keys alone": {"value_map": None},
            "groups": {"key_map": torch.ones(4, 1), "value_map": torch.ones(4, 1)},
            "another": {"implementation": "flash_attention_2"},
        }
        options |= changes[case]
    monkeypatch.setattr(cpu_explicit, "explicit_attention_forward", lambda *arguments, **options: (arguments, options))
    (*_, scaling), arguments = cpu_explicit.explicit_attention(toy_layer((8, 4)), *inputs, **options)
    assert scaling == SCALING
    assert arguments["key_map"] is options["key_map"]
