"""One of two ranks that run each model of a folder with tensor parallelism; `test_tensor_parallel.py` starts both.

Arguments: the folder of models, the file for the results of rank 0.
"""

import sys
from pathlib import Path

import torch
from torch import distributed
from transformers import AutoModelForCausalLM

import crosshead
from toys import tokens


@torch.no_grad()
def main(folders: Path, out: Path) -> None:
    """Load every model by the plan in its config; save its logits and the names of its sharded parameters."""
    results = {}
    for folder in sorted(folders.iterdir()):
        model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", attn_implementation="eager").eval()
        layer = model.model.layers[0]
        sharded = {name for name, parameter in layer.named_parameters() if hasattr(parameter, "placements")}
        results[folder.name] = (model(tokens()).logits, sorted(sharded))
    if distributed.get_rank() == 0:
        torch.save({"version": crosshead.__version__, "models": results}, out)
    distributed.barrier()
    distributed.destroy_process_group()  # otherwise its threads may outlive the interpreter and abort it


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
