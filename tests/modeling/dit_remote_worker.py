"""Loads a saved pipeline and its transformer by remote code, in a process without crosshead, and saves its images.

Argument: a folder that contains `pipeline`; the images are saved there as `images.safetensors`.
"""

import sys
from pathlib import Path

import torch
from diffusers import AutoModel, DiTPipeline
from safetensors.torch import save_file


def images(pipeline: DiTPipeline) -> torch.Tensor:
    """Return images of classes 1 and 5, sampled with a fixed seed."""
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    return torch.from_numpy(pipeline([1, 5], generator=generator, num_inference_steps=3, output_type="np").images)


def main(folder: Path) -> None:
    """Sample images with the pipeline, with a re-saved copy of it, and with the transformer loaded separately."""
    first = DiTPipeline.from_pretrained(folder / "pipeline", trust_remote_code=True)
    if not type(first.transformer).__module__.startswith("diffusers_modules"):
        raise SystemExit(f"{type(first.transformer)} is not remote code")
    first.save_pretrained(folder / "again")
    again = DiTPipeline.from_pretrained(folder / "again", trust_remote_code=True)
    alone = AutoModel.from_pretrained(f"{folder}/pipeline/transformer", trust_remote_code=True)
    other = DiTPipeline(transformer=alone, vae=first.vae, scheduler=first.scheduler)
    # The first pipeline runs last: meanwhile diffusers has loaded the same remote code twice more.
    results = {"again": images(again), "alone": images(other), "first": images(first)}
    save_file(results, folder / "images.safetensors")


if __name__ == "__main__":
    sys.modules["crosshead"] = None  # type: ignore[assignment]  # any import of it fails
    main(Path(sys.argv[1]))
