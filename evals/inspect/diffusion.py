"""Opens a DiT, the diffusion transformer of diffusers, adds noise to an image, and records a block's states.

A model folder contains a transformer that reads pixels, or a `DiTPipeline`, whose autoencoder encodes an image.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from crosshead.common.checked_json import read_object
from crosshead.common.errors import EvalError, one_line
from crosshead.common.images import MODES, upright
from crosshead.common.model_location import expand_home
from crosshead.modeling.mechanisms.base import AttentionState

from ..cost.dit_config import CLASSES, DiTConfig
from ..open_model import Opened
from .layer import LayerStates, Recorder

PIPELINE, TRANSFORMER, VAE, SCHEDULER = "model_index.json", "transformer", "vae", "scheduler"
"""The file that marks a pipeline's folder, and the folders of its parts."""
LARGEST = 2**20
"""Maximum size of a config.json in bytes."""
TIME, SEED = 250, 0
"""Default timestep of the noise, and seed of the noise."""


def open_dit(name: str) -> Opened | None:
    """Open a DiT without its weights; None if the folder contains another kind of model."""
    folder = transformer_folder(expand_home(name))
    if not (folder / "config.json").is_file():
        return None
    content = read_object(folder / "config.json", LARGEST, "a config.json")
    if content.get("_class_name") not in CLASSES:
        return None
    model = DiTConfig.read(content, name).on_meta()
    fields = model.config
    config = SimpleNamespace(
        model_type=DiTConfig.model_type,
        mixers=model.mixers,
        num_attention_heads=fields.num_attention_heads,
        head_dim=fields.attention_head_dim,
        num_channels=fields.in_channels,
        image_size=fields.sample_size,
        patch_size=fields.patch_size,
        no_class=fields.num_embeds_ada_norm,  # the label of "no class" follows that of the last class
    )
    return Opened(str(expand_home(name)), config)


def transformer_folder(folder: Path) -> Path:
    """Return the transformer's folder if `folder` is a pipeline, otherwise `folder`."""
    return folder / TRANSFORMER if (folder / PIPELINE).is_file() else folder


def load_dit(opened: Opened) -> Any:
    """Load the model in float32."""
    from crosshead.modeling.dit import CrossheadDiTTransformer2DModel

    return _load(CrossheadDiTTransformer2DModel, transformer_folder(Path(opened.name)), "model").eval()


def image_reader(opened: Opened, time: int) -> Callable[[Path], tuple[dict[str, Any], torch.Tensor]]:
    """Return a function from an image file to the model's arguments at a timestep, without a class, and colours."""
    from diffusers import AutoencoderKL, DDPMScheduler

    folder, config = Path(opened.name), opened.config
    schedule_folder = folder / SCHEDULER if (folder / PIPELINE).is_file() else folder
    has_schedule = (schedule_folder / "scheduler_config.json").is_file()
    schedule = _load(DDPMScheduler, schedule_folder, "scheduler") if has_schedule else DDPMScheduler()
    if not 0 <= time < len(schedule.betas):
        raise EvalError(f"--time {time} is not allowed: {opened.label} has the times 0 to {len(schedule.betas) - 1}")
    vae = _load(AutoencoderKL, folder / VAE, "vae").eval() if (folder / VAE).is_dir() else None
    channels = config.num_channels if vae is None else vae.config.in_channels
    if channels not in MODES:
        raise EvalError(
            f"{opened.label} reads latents with {channels} channels: give the folder of a DiTPipeline, with its vae"
        )
    size = config.image_size * (1 if vae is None else 2 ** (len(vae.config.block_out_channels) - 1))

    def read(file: Path) -> tuple[dict[str, Any], torch.Tensor]:
        pixels = _square(file, size, channels)
        colours = (pixels[0].permute(1, 2, 0) + 1) / 2
        clean = pixels if vae is None else vae.encode(pixels).latent_dist.mean * vae.config.scaling_factor
        noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(SEED))
        times = torch.tensor([time])
        arguments = {
            "hidden_states": schedule.add_noise(clean, noise, times),
            "timestep": times,
            "class_labels": torch.tensor([config.no_class]),
        }
        return arguments, colours

    return torch.no_grad()(read)


def _load(kind: Any, folder: Path, part: str) -> Any:
    """Load a part of a model from its folder."""
    options = {} if part == "scheduler" else {"use_safetensors": True, "torch_dtype": torch.float32}
    try:
        return kind.from_pretrained(str(folder), **options)
    except Exception as error:  # the files may be broken in many ways
        raise EvalError(f"the {part} of {folder} cannot be loaded: {one_line(error)}") from error


def _square(file: Path, size: int, channels: int) -> torch.Tensor:
    """Return the central square of an image (1, channels, size, size), with values from -1 to 1."""
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as image:
            square = ImageOps.fit(upright(image, channels), (size, size), Image.Resampling.BICUBIC)
    except Exception as error:  # Pillow raises many types of errors
        raise EvalError(f"the image {file} cannot be read: {one_line(error)}") from None
    values = torch.frombuffer(bytearray(square.tobytes()), dtype=torch.uint8).reshape(1, size, size, channels)
    return values.permute(0, 3, 1, 2).float() / 127.5 - 1


class _First(Recorder):
    """Records head outputs before the mechanisms change them; also forces attention that computes all heads."""

    def attention_function(self, state: AttentionState, implementation: str | None, masked: bool) -> str:
        """Return sdpa attention, which also computes the heads that a router does not select."""
        return "sdpa"


class _Last(Recorder):
    """Passes the states to `receive` after all mechanisms."""

    def __init__(self, first: Recorder, receive: Callable[[LayerStates], None]) -> None:
        super().__init__()
        self.first, self.receive = (first,), receive  # not a submodule

    def head_outputs(self, output: torch.Tensor, state: AttentionState) -> torch.Tensor:
        """Pass the states on. Attention has no mask, so its weights follow from queries and keys."""
        super().head_outputs(output, state)
        logits = state.query @ state.key.transpose(2, 3) * state.query.shape[-1] ** -0.5
        outputs = self.first[0].outputs[0], output[0]
        self.receive(LayerStates(logits.softmax(-1)[0], state.value[0], *outputs, self.routing, None))
        return output


@contextmanager
def record_block(processor: Any, receive: Callable[[LayerStates], None]) -> Iterator[None]:
    """Pass the states of each call of a block's attention processor to `receive`; the batch size must be 1."""
    mixers, first = processor.mixers, _First()
    processor.mixers = nn.ModuleDict({"first": first, **mixers, "last": _Last(first, receive)})
    try:
        yield
    finally:
        processor.mixers = mixers
