"""Conversions neither depend on the caller's global torch state (dtype, device, grad mode) nor change it."""

from contextlib import contextmanager

import pytest
import torch

import crosshead
from crosshead.conversion.sources.safetensors_store import WEIGHTS
from tiers import first
from toy_checkpoints import write_stock

MIXERS = {"explicit": {"key_heads": 1, "value_heads": 1}, "knocking": {"init": "random"}}


@contextmanager
def float64_default_dtype():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        assert torch.get_default_dtype() == torch.float64
        torch.set_default_dtype(before)


STATES = {
    "device": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "dtype": float64_default_dtype,
    "no gradients": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_stock(folder / "source")
    (folder / "text.txt").write_text(" ".join(f"w{number * number % 53}" for number in range(900)))
    options = {"calibration": folder / "text.txt", "allow_inexact": True}
    crosshead.convert(folder / "source", folder / "out", MIXERS, **options)
    return folder, options, crosshead.verify(folder / "source", folder / "out")


@pytest.mark.parametrize("state", first(STATES, 2))
def test_conversion_ignores_global_torch_state(state, expected, tmp_path):
    folder, options, verified = expected
    with STATES[state]():
        crosshead.convert(folder / "source", tmp_path / "out", MIXERS, **options)
        report = crosshead.verify(folder / "source", tmp_path / "out")
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    assert (grad, inference) == (state not in ("inference", "no gradients"), state == "inference")
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (folder / "out" / WEIGHTS).read_bytes()
    assert report["verification"]["kl_divergence"] == verified["verification"]["kl_divergence"]


def test_paths_with_tilde_are_expanded(expected, tmp_path, monkeypatch):
    folder, _, verified = expected
    monkeypatch.setenv("HOME", str(folder))
    options = {"calibration": "~/text.txt", "save_calibration": "~/saved.safetensors", "allow_inexact": True}
    crosshead.convert("~/source", tmp_path / "out", MIXERS, **options, verify=False)
    assert (folder / "saved.safetensors").exists()
    text = crosshead.verify("~/source", "~/out", text="~/text.txt")
    assert text["verification"]["kl_divergence"] != verified["verification"]["kl_divergence"]


def test_mixers_given_as_string_are_refused(expected, tmp_path):
    with pytest.raises(ValueError, match=r"mixers='knocking'.*\{'knocking': \{\}\}"):
        crosshead.convert(expected[0] / "source", tmp_path / "out", "knocking")
