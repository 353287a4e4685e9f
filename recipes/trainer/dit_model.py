"""DiT for training: the paper's initial values, and one embedding of time and class for all blocks.

diffusers gives each block an embedding of time and class of its own, which drops labels at random by itself. In the
paper there is one, and a label is dropped for the whole model or not at all. Here all blocks share that of the first
one, and labels are dropped with the data.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers.utils import SAFE_WEIGHTS_NAME

ZERO = ("norm1.linear", "proj_out_1", "proj_out_2")
"""Maps that start as zero: those of AdaLN-zero, and the last one."""
SMALL = ("timestep_embedder.linear_1", "timestep_embedder.linear_2", "class_embedder.embedding_table")
SMALL_STD = 0.02
FUSED = ("to_q", "to_k", "to_v")
"""In the paper's code one matrix, for whose size Xavier's range is smaller."""


@torch.no_grad()
def initialise(model: nn.Module) -> None:
    """Set the initial values of DiT's code; those of mechanisms stay as they are."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            gain = 0.5**0.5 if name.endswith(FUSED) else 1.0
            nn.init.xavier_uniform_(module.weight.flatten(1), gain)  # a patch is embedded by a linear map
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        if name.endswith(ZERO):
            nn.init.zeros_(module.weight)
        if name.endswith(SMALL):
            nn.init.normal_(module.weight, std=SMALL_STD)


def share_embeddings(model: Any) -> None:
    """Let all blocks use the first one's embedding of time and class, which keeps all labels."""
    first = model.transformer_blocks[0].norm1.emb
    first.class_embedder.dropout_prob = 0.0
    for block in model.transformer_blocks:
        block.norm1.emb = first


def save_model(model: Any, folder: Path) -> None:
    """Save a trained model as diffusers does, with a copy of the embedding in each block."""
    first = model.transformer_blocks[0].norm1.emb
    for block in model.transformer_blocks[1:]:
        block.norm1.emb = copy.deepcopy(first)
    model.save_pretrained(str(folder))
    for block in model.transformer_blocks[1:]:
        block.norm1.emb = first


def save_weights(model: nn.Module, checkpoint: Path) -> None:
    """Save the weights as the Trainer loads them; tensors that several blocks share are stored for each."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    state = {name: part.detach().cpu().clone().contiguous() for name, part in model.state_dict().items()}
    save_file(state, checkpoint / SAFE_WEIGHTS_NAME)
