"""Benchmark cases: both sides compute the same results from the same tensors, at any shape.

Slow tier, like all measuring tools; `test_bench_command.py` has a quick run of each command in the default tier.
"""

from dataclasses import replace

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from crosshead.common.errors import EvalError
from crosshead.evals.bench import attention as bench_attention
from crosshead.evals.bench import models as bench_models
from crosshead.evals.bench.attention import attention_run, dense_attention, random_gates, stock_attention
from crosshead.evals.bench.case import MEMORY, on_device
from crosshead.evals.bench.cases import ATTENTION, COMPILED, DECODE
from crosshead.modeling.mechanisms.explicit import explicit_attention_forward

pytestmark = pytest.mark.slow

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 50}
CASES = {case.name: case for case in (*ATTENTION, *DECODE)}


def small_case(name, **shape):
    case = CASES[name]
    shape = {"tokens": 40} | shape
    return replace(case, shape=case.shape | (SMALL if "hidden_size" in case.shape else {}) | shape)


def test_case_names_and_descriptions_are_unique():
    assert len(CASES) == len(ATTENTION) + len(DECODE)
    descriptions = {(case.description, case.baseline) for case in CASES.values()}
    assert len(descriptions) == len(CASES)
    for case in CASES.values():
        assert case.unit == ("bytes" if case.measures_memory or case.name == "cache" else "seconds")


def test_target_ratios_of_cases():
    expected = {
        "mixture-half-2048": (0.75, None),
        "mixture-half-4096": (0.65, 0.60),
        "mixture-half-8192": (None, 0.60),
        "mixture-three-quarters-2048": (0.95, 0.80),
        "mixture-gradients-4096": (0.80, 0.65),
        "mixture-prompt": (0.85, 0.85),
        "mixture-published-4096": (1.3, 1.3),
        "talking-forward": (0.35, 0.35),
        "talking-gradients": (0.5, 0.5),
        "talking-forward-memory": (1 / 32, 1 / 32),
        "talking-forward-beside-sdpa": (2.2, 2.2),
        "talking-published-beside-sdpa": (2.2, 2.2),
        "talking-gradients-beside-sdpa": (None, None),
        "knocking-step": (1.05, 1.02),
        "knocking-linear-prompt": (1.05, 1.05),
        "talking-step-memory": (1.3, 1.3),
        "differential-step-memory": (1.05, 1.05),
        "grouped-8k": (0.5, 0.5),
        "grouped-32k-batch-8": (0.5, 0.5),
        "ungrouped-8k": (1.0, 1.0),
        "model-16k": (0.9, 0.9),
        "cache": (0.5, 0.5),
        "host-knocking-linear": (1.2, None),
        "host-knocking-mlp": (None, None),
        "host-explicit": (1.4, None),
        "host-mixture": (1.4, None),
        "host-differential": (1.5, None),
    }
    assert {
        name: tuple(CASES[name].targets.get(device) for device in ("cpu", "cuda")) for name in expected
    } == expected


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.measured != MEMORY])
def test_both_sides_return_the_same_output_shape(name, monkeypatch):
    monkeypatch.setattr(bench_attention, "UNCACHED_BYTES", 1)
    results = [first_tensor(run()) for run in small_case(name).pair() for _ in range(2)]
    if "-step" not in name:  # a training step gives nothing back
        assert len({tensor.shape for tensor in results}) == 1
        assert all(tensor.isfinite().all() for tensor in results)


def first_tensor(result):
    """Return the logits, the first of several gradients, or the result itself, as a tensor."""
    result = getattr(result, "logits", result)
    result = result[0] if isinstance(result, (list, tuple)) else result
    return result if result is None else torch.as_tensor(result)


def test_attention_inputs_do_not_depend_on_the_global_seed():
    inputs = []

    def attend(query, key, value):
        inputs.append([query, key, value])
        return dense_attention(query, key, value)

    for _ in range(2):
        torch.rand(3)
        attention_run(attend, 8, 2, 4, gradients=False)()
    for one, other in zip(*inputs, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(*inputs[0][:2])


@pytest.mark.parametrize("name", ["mixture-half-2048", "mixture-half-padded-2048", "mixture-published-4096"])
def test_mixture_matches_dense_attention_on_active_heads(name):
    ours, baseline = small_case(name).pair()
    gates = random_gates(40, 16, 8, 4)
    assert gates.sum(-1).eq(8).all() and gates[..., :4].eq(1).all()
    visible = slice(40 // 16 * ("padded" in name), None)  # the first queries of a padded text see no key
    torch.testing.assert_close((ours() * gates[..., None])[:, visible], (baseline() * gates[..., None])[:, visible])


def test_mixture_gradients_cover_query_key_and_value():
    for gradients in (run() for run in small_case("mixture-gradients-2048").pair()):
        assert [x.shape for x in gradients] == [(1, 16, 40, 64)] * 3


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("mixture-half-2048", "crosshead_mixture"),
        ("talking-forward", "crosshead_talking"),
        ("grouped-8k", "crosshead_explicit"),
        ("mixture-published-4096", None),
        ("talking-published-beside-sdpa", None),
    ],
)
def test_cases_run_registered_attention_functions(name, function, monkeypatch):
    """Cases of a published model run the attention function in its own code instead."""
    called = []
    for attention in ("crosshead_mixture", "crosshead_talking", "crosshead_explicit"):
        monkeypatch.setitem(
            ALL_ATTENTION_FUNCTIONS._global_mapping,
            attention,
            recording(attention, ALL_ATTENTION_FUNCTIONS[attention], called),
        )
    small_case(name).side(True)()
    assert called == ([] if function is None else [function])


def recording(name, function, called):
    return lambda *arguments, **options: called.append(name) or function(*arguments, **options)


@pytest.mark.parametrize("name", ["talking-forward", "talking-gradients"])
def test_blockwise_talking_matches_eager(name):
    torch.manual_seed(9)  # the same maps, whatever random numbers were drawn before
    results, expected = (run() for run in small_case(name).pair())
    if name == "talking-forward":
        results, expected = [results], [expected]
    assert len(results) == (1 if name == "talking-forward" else 5)  # with the gradients of both maps
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    assert not torch.equal(
        small_case("talking-forward").side(False)(), small_case("talking-forward-beside-sdpa").side(False)()
    )


@pytest.mark.parametrize("name", ["grouped-8k", "grouped-8k-padded", "grouped-8k-normed", "grouped-8k-two"])
def test_explicit_matches_stock_attention_on_combined_heads(name, monkeypatch):
    monkeypatch.setattr(bench_attention, "UNCACHED_BYTES", 1)
    case, captured = small_case(name), {}

    def capture(module, query, key, value, mask, **options):
        captured.update(options | {"query": query, "key": key, "value": value, "mask": mask})
        return explicit_attention_forward(module, query, key, value, mask, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "crosshead_explicit", capture)
    output = case.side(True)()
    keys, values = (
        torch.einsum("ij,bjsd->bisd", captured[f"{side}_map"], captured[side]).detach() for side in ("key", "value")
    )
    assert captured["key"].shape == (1, 4, 40, 128) and keys.shape == (1, 8, 40, 128)
    hidden = {"padded": [2], "two": [1, 0]}.get(name.removeprefix("grouped-8k").strip("-"))
    assert (captured["mask"] is None) is (hidden is None)
    if hidden:
        assert (~captured["mask"]).sum(-1).flatten().tolist() == hidden
    assert (captured["key_scale"] is None) is not name.endswith("normed")
    if captured["key_scale"] is not None:
        keys = keys * captured["key_scale"].unsqueeze(-1)
    torch.testing.assert_close(
        output, stock_attention(captured["query"], keys, values, captured["mask"]), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize(
    "case", [case for name, case in CASES.items() if name.startswith("host-")], ids=lambda case: case.name
)
def test_host_cases_decode_one_token_on_one_thread_and_restore_the_thread_count(case):
    ours, baseline = case.pair()
    counts, before = [], torch.get_num_threads()
    torch.set_num_threads(2)
    hook = register_module_forward_pre_hook(lambda *call: counts.append(torch.get_num_threads()))
    try:
        logits_ours, logits_baseline = ours().logits, baseline().logits
        assert torch.get_num_threads() == 2
    finally:
        hook.remove()
        torch.set_num_threads(before)
    assert logits_ours.shape == logits_baseline.shape == (1, 1, 64) and not torch.equal(logits_ours, logits_baseline)
    assert counts and set(counts) == {1}


def test_inputs_are_copied_until_they_exceed_the_cpu_cache(monkeypatch):
    made = []
    monkeypatch.setattr(bench_attention, "cycle", lambda turns: made.append(len(turns)) or iter(turns * 9))
    monkeypatch.setattr(bench_attention, "UNCACHED_BYTES", 5 * 2 * 8 * 40 * 128 * 4 - 1)
    small_case("grouped-8k").pair()
    assert made == [5, 5]


def test_next_token_attends_to_the_full_cache_length():
    shape = small_case("model-16k").shape
    for ours in (True, False):
        run = bench_models.next_token(ours, **shape)
        caches = [cell.cell_contents for cell in run.__wrapped__.__closure__ if hasattr(cell.cell_contents, "layers")]
        (cache,) = caches
        assert run().logits.shape == (1, 1, 50)
        assert [layer.keys.shape[2] for layer in cache.layers] == [40]
        assert cache.layers[0].keys[0, :, 0].numel() == (4 if ours else 8) * 128


def test_cache_case_counts_kv_bytes_of_the_model():
    ours, stock_bytes = (run() for run in small_case("cache", tokens=7).pair())
    assert stock_bytes == 2 * 8 * 7 * 128 * 4 and 2 * ours == stock_bytes


def test_on_device_sets_and_restores_the_default_dtype(monkeypatch):
    with on_device("cpu"):
        assert torch.randn(1).dtype == torch.float32
    monkeypatch.setitem(on_device.__wrapped__.__globals__["DTYPES"], "cpu", torch.bfloat16)
    with pytest.raises(KeyError), on_device("cpu"):
        assert torch.randn(1).dtype == torch.bfloat16
        raise KeyError
    assert torch.randn(1).dtype == torch.float32


@pytest.mark.compile
@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.name)
def test_compiled_training_step_matches_eager(case, monkeypatch):
    monkeypatch.setattr(bench_models, "COMPILER_BACKEND", "aot_eager")
    shape, made = case.shape | SMALL | {"tokens": 40}, bench_models.build_model

    def learnt(make):
        models = []
        monkeypatch.setattr(
            bench_models, "build_model", lambda ours, **sizes: models.append(made(ours, **sizes)) or models[-1]
        )
        for run in replace(case, shape=shape, make=make).pair():
            run()
            run()
        return [part.detach() for model in models for part in model.parameters()]

    before = [part for ours in (True, False) for part in made(ours, **shape).parameters()]
    compiled, plain = learnt(case.make), learnt(bench_models.training_step)
    assert len(before) == len(compiled) and not all(map(torch.equal, before, compiled))
    torch.testing.assert_close(compiled, plain, rtol=0, atol=1e-6)


def test_missing_compiler_is_refused(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(EvalError, match="no-such-compiler"):
        bench_models.check_compiler()
