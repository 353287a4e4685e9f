"""Loads a saved pipeline and its transformer by their code, in a process without crosshead, and keeps the images.

Argument: a folder with `pipeline`; the images go there as `images.safetensors`.
"""

import sys
from pathlib import Path

import torch
from diffusers import AutoModel, DiTPipeline
from safetensors.torch import save_file


def images(pipeline: DiTPipeline) -> torch.Tensor:
    """Images of two classes, drawn with one seed."""
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    return torch.from_numpy(pipeline([1, 5], generator=generator, num_inference_steps=3, output_type="np").images)


def main(folder: Path) -> None:
    """Draw images with the pipeline, with one saved from here, and with the transformer loaded by itself."""
    first = DiTPipeline.from_pretrained(folder / "pipeline", trust_remote_code=True)
    if not type(first.transformer).__module__.startswith("diffusers_modules"):
        raise SystemExit(f"{type(first.transformer)} is not remote code")
    first.save_pretrained(folder / "again")
    again = DiTPipeline.from_pretrained(folder / "again", trust_remote_code=True)
    alone = AutoModel.from_pretrained(f"{folder}/pipeline/transformer", trust_remote_code=True)
    other = DiTPipeline(transformer=alone, vae=first.vae, scheduler=first.scheduler)
    # The first one last: diffusers has run the same code twice more in between.
    found = {"again": images(again), "alone": images(other), "first": images(first)}
    save_file(found, folder / "images.safetensors")


if __name__ == "__main__":
    sys.modules["crosshead"] = None  # type: ignore[assignment]  # any import of it fails
    main(Path(sys.argv[1]))
