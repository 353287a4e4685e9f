"""One of two processes that share each model of a folder; `test_tensor_parallel.py` starts both.

Arguments: the folder of models, the file for rank 0's results.
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
    """Load every model by the plan in its config, and keep its logits and how its layers are spread."""
    found = {}
    for folder in sorted(folders.iterdir()):
        model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", attn_implementation="eager").eval()
        layer = model.model.layers[0]
        spread = {name for name, parameter in layer.named_parameters() if hasattr(parameter, "placements")}
        found[folder.name] = (model(tokens()).logits, sorted(spread))
    if distributed.get_rank() == 0:
        torch.save({"version": crosshead.__version__, "models": found}, out)
    distributed.barrier()
    distributed.destroy_process_group()  # left alone, its threads may outlive the interpreter and abort it


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
