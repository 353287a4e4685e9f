"""Tiny DiT models, stock and with mechanisms, and a tiny DiTPipeline."""

from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel

from crosshead.modeling.dit import CrossheadDiTTransformer2DModel
from toys import lopsided

SIZES: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "num_layers": 2,
    "sample_size": 6,
    "patch_size": 2,
    "in_channels": 3,
    "out_channels": 6,
    "num_embeds_ada_norm": 7,
}
MIXTURE: dict[str, Any] = {"mixture": {"active_heads": 3, "shared_heads": 2}}
NEUTRAL: dict[str, Any] = {"mixture": {"active_heads": 4, "gate": "binary"}}
LATENTS = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(3))
TIMES, LABELS = torch.tensor([3, 700]), torch.tensor([1, 7])  # class 7 is the unconditional class


def stock_dit(**changes: Any) -> DiTTransformer2DModel:
    """Return a tiny stock DiT with lopsided weights."""
    return lopsided(DiTTransformer2DModel(**SIZES | changes)).eval()


def our_dit(mixers: dict[str, Any], **changes: Any) -> CrossheadDiTTransformer2DModel:
    """Return a tiny crosshead DiT with mechanisms and lopsided weights."""
    return lopsided(CrossheadDiTTransformer2DModel(**SIZES | changes, mixers=mixers)).eval()


def pipeline(transformer: DiTTransformer2DModel | None = None) -> DiTPipeline:
    """Return a pipeline of random weights with ImageNet's 1,000 classes, which DiTPipeline hard-codes."""
    torch.manual_seed(0)
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4, layers_per_block=1)
    scheduler = DDIMScheduler(clip_sample=False)
    if transformer is None:
        transformer = stock_dit(in_channels=4, out_channels=8, num_embeds_ada_norm=1000)
    made = DiTPipeline(transformer, vae.eval(), scheduler)
    made.set_progress_bar_config(disable=True)
    return made


def samples(made: DiTPipeline, guidance: float = 4.0) -> torch.Tensor:
    """Return images of classes 1 and 5, sampled with a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    options = {"num_inference_steps": 3, "guidance_scale": guidance, "output_type": "np"}
    return torch.from_numpy(made([1, 5], generator=generator, **options).images)
