"""Compares MoH-DiT with DiT at toy size: held-out denoising losses on the digits of scikit-learn, several seeds.

usage: PYTHONPATH=tests/measure python -P tests/measure/diffusion.py OUT.json [--steps 600] [--seeds 3]

The images (8 x 8, one channel) replace latents. The objective is that of DDPM: the mean squared error of the
predicted noise at random time steps, plus the balance loss. Models with the same seed start from the same stock
weights and see the same images with the same noise. A fifth of the images is held out; the held-out loss is measured
with the averaged weights (EMA), at fixed time steps with fixed noise.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from diffusers import DDPMScheduler
from diffusers.training_utils import EMAModel
from from_scratch import BASELINE, lines, report
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from crosshead.modeling.dit import CrossheadDiTTransformer2DModel

CASES: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "mixture, 75%": {"mixture": {"active_heads": 6, "shared_heads": 2}},
    "mixture, 50%": {"mixture": {"active_heads": 4, "shared_heads": 2}},
}
SHAPE: dict[str, Any] = {
    "num_attention_heads": 8,
    "attention_head_dim": 8,
    "num_layers": 4,
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 1,
    "num_embeds_ada_norm": 10,
}
BATCH, RATE, DECAY = 128, 1e-3, 0.995
TIMES = 16
"""Number of evaluations of each held-out image, at different time steps."""


def images() -> tuple[Tensor, Tensor]:
    """All images (N, 1, 8, 8) with values between -1 and 1, in a fixed random order, and their classes (N,)."""
    pixels, classes = load_digits(return_X_y=True)
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    scaled = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    return scaled[order], torch.tensor(classes)[order]


def initialise(model: nn.Module) -> None:
    """Initialise like DiT: blocks start as the identity (AdaLN-zero), and the output is zero."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            zero = name.endswith(("norm1.linear", "proj_out_1", "proj_out_2"))
            weight = module.weight.flatten(1)  # the convolution of the patch embedding is initialised as a linear map
            nn.init.zeros_(weight) if zero else nn.init.xavier_uniform_(weight)
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding) or name.endswith(
            ("timestep_embedder.linear_1", "timestep_embedder.linear_2")
        ):
            nn.init.normal_(module.weight, std=0.02)


def trained(mixers: dict[str, Any], seed: int, steps: int) -> float:
    """Train a model, and return its held-out loss."""
    pixels, classes = images()
    held_out = len(classes) // 5
    torch.manual_seed(seed)
    model = CrossheadDiTTransformer2DModel(**SHAPE, mixers=mixers).train()
    torch.manual_seed(seed)
    initialise(model)
    ema = EMAModel(model.parameters(), decay=DECAY, model_cls=type(model), model_config=model.config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = DDPMScheduler()
    draws = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = torch.randint(held_out, len(classes), (BATCH,), generator=draws)
        output, noise = denoise(model, schedule, pixels[rows], classes[rows], draws)
        loss = functional.mse_loss(output.sample, noise) + output.auxiliary_loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ema.step(model.parameters())
    ema.copy_to(model.parameters())
    with torch.no_grad():
        fixed = torch.Generator().manual_seed(1)
        rows = torch.arange(held_out).repeat(TIMES)
        output, noise = denoise(model.eval(), schedule, pixels[rows], classes[rows], fixed)
        return functional.mse_loss(output.sample, noise).item()


def denoise(model: nn.Module, schedule: Any, clean: Tensor, classes: Tensor, draws: torch.Generator) -> Any:
    """The model's output for noisy images (N, 1, 8, 8) at random time steps, and the noise."""
    noise = torch.randn(clean.shape, generator=draws)
    times = torch.randint(schedule.config.num_train_timesteps, (len(clean),), generator=draws)
    return model(schedule.add_noise(clean, noise, times), times, classes), noise


def main() -> None:
    """Train all cases, seed by seed, and print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    settings = {"shape": SHAPE, "steps": options.steps, "batch": BATCH, "learning_rate": RATE, "ema_decay": DECAY}
    losses: dict[str, dict[int, float]] = {}
    for seed in range(options.seeds):
        for name, mixers in CASES.items():
            losses.setdefault(name, {})[seed] = trained(mixers, seed, options.steps)
            print(f"seed {seed}, {name}: {losses[name][seed]:.4f}", flush=True)
            results = report(losses, CASES, settings)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print("\n".join(lines(results)))


if __name__ == "__main__":
    main()
