"""`verify --engine`: refusals, and the comparison of two engines' results. `tests/engines/` runs real engines."""

import sys

import pytest

import crosshead
import toys
from crosshead.common.errors import ConversionError
from crosshead.conversion.verification.engines import compared, verify_in_engine
from encoder_toys import write_encoder
from gguf_tokenizers import characters
from toy_checkpoints import write_model

MIXERS = {"explicit": {"norm": False, "key_heads": 1, "value_heads": 1}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engines")
    write_model(toys.mixed_model("Llama", MIXERS), folder / "model")
    characters().save_pretrained(folder / "model")
    crosshead.fold(folder / "model", folder / "folded", keep_cache=True, verify=False)
    return folder / "model", folder / "folded"


@pytest.mark.parametrize(
    ("engine", "python", "reason"),
    [
        ("tgi", None, "--engine tgi"),
        ("vllm", sys.executable, "pip install vllm"),
        ("vllm", "/no/such/python", "--engine-python /no/such/python"),
        ("llama.cpp", sys.executable, "pip install llama-cpp-python"),
    ],
)
def test_unavailable_engine_is_refused(engine, python, reason, folders):
    with pytest.raises(ConversionError) as caught:
        verify_in_engine(*folders, engine, python=python)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("engine", ["vllm", "llama.cpp"])
def test_encoders_are_refused(engine, tmp_path):
    source = write_encoder(tmp_path / "source")
    with pytest.raises(ConversionError, match=rf"--engine {engine}.*'bert'") as caught:
        verify_in_engine(source, source, engine)
    assert "\n" not in str(caught.value)


def test_foreign_model_code_is_refused(folders, tmp_path):
    write_model(toys.mixed_model("Llama", MIXERS), tmp_path / "model")
    (tmp_path / "model" / "modeling_crosshead.py").write_text("raise SystemExit\n")
    with pytest.raises(ConversionError, match="trust-remote-code"):
        verify_in_engine(tmp_path / "model", folders[1], "vllm")


def test_compared_reports_differences_of_engine_results():
    numbers = {"version": "1", "kv_bytes_per_token": 8.0, "kv_cache_tokens": 100, "tokens_per_second": 5.0}
    source = {**numbers, "logprobs": [[-1.0, -2.0], [-3.0]], "tokens": [[1, 2], [3, 4]], "greedy_text": "a"}
    model = {**numbers, "logprobs": [[-1.0, -2.5], [-3.0]], "tokens": [[1, 2], [3, 5]], "greedy_text": "b"}
    report = compared({"source": source, "model": model | {"kv_cache_tokens": 150}})
    assert report["greatest_logprob_difference"] == 0.5
    assert report["greedy_agreement"] == 0.75
    assert report["source"]["loss"] == 2.0
    assert (report["source"]["kv_cache_tokens"], report["model"]["kv_cache_tokens"]) == (100, 150)
