"""Checks that a device exists, and restores the default settings of torch inside a call."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


def check_device(device: str, error_type: type[ValueError]) -> None:
    """Raise `error_type` if the device is CUDA and this machine has no CUDA device."""
    if device == "cuda" and not torch.cuda.is_available():
        raise error_type("--device cuda: no CUDA device is available; use --device cpu")


@contextmanager
def default_torch_state() -> Iterator[None]:
    """A context or decorator with default device CPU and dtype float32, without autocast and inference mode."""
    dtype = torch.get_default_dtype()
    with ExitStack() as stack:
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        torch.set_default_dtype(torch.float32)
        stack.callback(torch.set_default_dtype, dtype)
        yield
