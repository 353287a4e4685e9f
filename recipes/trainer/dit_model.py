"""DiT for training: the paper's initialisation, and one timestep and class embedding shared by all blocks.

In diffusers, each block has its own timestep and class embedding, which drops labels at random on its own. The paper
has a single embedding, so that a label is dropped for the whole model or not at all. Here, all blocks share the first
block's embedding, and the data drop labels.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers.utils import SAFE_WEIGHTS_NAME

ZERO = ("norm1.linear", "proj_out_1", "proj_out_2")
"""Linear layers that are initialised to zero: adaLN-Zero modulation (norm1.linear, proj_out_1) and the output."""
SMALL = ("timestep_embedder.linear_1", "timestep_embedder.linear_2", "class_embedder.embedding_table")
"""Layers that are initialised from a normal distribution with `SMALL_STD`."""
SMALL_STD = 0.02
FUSED = ("to_q", "to_k", "to_v")
"""Projections that are one fused matrix in the paper's code, for whose size the Xavier range is smaller."""


@torch.no_grad()
def initialise(model: nn.Module) -> None:
    """Initialise the model like the DiT paper's code; the parameters of mechanisms keep their values."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            gain = 0.5**0.5 if name.endswith(FUSED) else 1.0
            nn.init.xavier_uniform_(module.weight.flatten(1), gain)  # treats the patch convolution as a linear layer
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        if name.endswith(ZERO):
            nn.init.zeros_(module.weight)
        if name.endswith(SMALL):
            nn.init.normal_(module.weight, std=SMALL_STD)


def share_embeddings(model: Any) -> None:
    """Let all blocks share the first block's timestep and class embedding, with label dropping disabled."""
    first = model.transformer_blocks[0].norm1.emb
    first.class_embedder.dropout_prob = 0.0
    for block in model.transformer_blocks:
        block.norm1.emb = first


def save_model(model: Any, folder: Path) -> None:
    """Save a trained model in diffusers' format, with a copy of the shared embedding in each block."""
    first = model.transformer_blocks[0].norm1.emb
    for block in model.transformer_blocks[1:]:
        block.norm1.emb = copy.deepcopy(first)
    model.save_pretrained(str(folder))
    for block in model.transformer_blocks[1:]:
        block.norm1.emb = first


def save_weights(model: nn.Module, checkpoint: Path) -> None:
    """Save the weights in the format that the Trainer loads; shared tensors are stored once per block."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    state = {name: part.detach().cpu().clone().contiguous() for name, part in model.state_dict().items()}
    save_file(state, checkpoint / SAFE_WEIGHTS_NAME)
