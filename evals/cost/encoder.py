"""Computes the cost of models that process a text, an image or a latent at once, without a cache and decoding.

TransNeXt multiplies queries by the keys of a window, and weights by its values, element by element. PyTorch's counter
misses these products, so they are counted separately.
"""

from typing import Any

import torch

from crosshead.common.images import image_shape
from crosshead.modeling.backbones.transnext_attention import CrossheadAggregatedAttention

from .counting import TRAINING_PASSES, Cost, multiplications, parameter_counts, work
from .dit_config import DiTConfig


def encoder_cost(model: Any, length: int, image_size: int | None = None) -> Cost:
    """Return the cost of an encoder with the head that its config names, for inputs of `length` tokens."""
    if hasattr(model.config, "image_size"):
        _check_tokens(length, image_tokens(model, image_size), "an image")
        inputs = _image(model, image_size)
    else:
        maximum = getattr(model.config, "max_position_embeddings", length)
        if length > maximum:
            raise ValueError(f"length={length} is not allowed: the model has max_position_embeddings={maximum}")
        inputs = torch.zeros(1, length, dtype=torch.long, device="meta")
    return _single_pass_cost(model, forward_multiplications(model, inputs), length)


def forward_multiplications(model: Any, *inputs: Any, **named_inputs: Any) -> int:
    """Return the number of multiplications of a forward pass on the meta device."""
    windows: list[int] = []
    hooks = [
        module.register_forward_hook(lambda layer, arguments, _: windows.append(_window_products(layer, arguments[0])))
        for module in model.modules()
        if isinstance(module, CrossheadAggregatedAttention)
    ]
    forward = multiplications(lambda: model(*inputs, **named_inputs))
    for hook in hooks:
        hook.remove()
    return forward + sum(windows)


def dit_cost(config: DiTConfig, length: int) -> Cost:
    """Return the cost of a DiT for one latent, without guidance."""
    _check_tokens(length, config.tokens, "a latent")
    model = config.on_meta()
    with torch.device("meta"):
        latent = torch.empty(1, model.config.in_channels, model.config.sample_size, model.config.sample_size)
        label = torch.zeros(1, dtype=torch.long)
    embeddings = sum(size.numel() for name, size in model.named_parameters() if ".norm1.emb." in name)
    blocks = len(model.transformer_blocks)
    forward = multiplications(lambda: model(latent, label, label))
    return _single_pass_cost(model, forward, length, embeddings * (blocks - 1) // blocks)


def _single_pass_cost(model: Any, forward: int, length: int, copied: int = 0) -> Cost:
    token = forward // length
    return Cost(**parameter_counts(model, copied), **work(TRAINING_PASSES * token, token, 0, whole=forward))


def image_tokens(model: Any, image_size: int | None = None) -> int:
    """Return the number of patches and special tokens of an image; with stages, the patches of the first stage."""
    base, image = model.base_model, _image(model, image_size)
    if hasattr(base, "patch_embed1"):
        return int(base.patch_embed1(image)[0].shape[1])
    return int(base.embeddings(image).shape[1])


def _image(model: Any, image_size: int | None) -> torch.Tensor:
    return torch.empty(1, *image_shape(model.config, image_size), dtype=model.dtype, device="meta")


def _check_tokens(length: int, tokens: int, what: str) -> None:
    if length != tokens:
        raise ValueError(f"length={length} is not allowed: {what} has {tokens} tokens here")


def _window_products(layer: Any, pixels: torch.Tensor) -> int:
    """Return the multiplications by the keys and the values of each pixel's window."""
    return 2 * pixels.numel() * layer.config.window_size**2
