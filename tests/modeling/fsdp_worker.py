"""One of two ranks that train toy models together; `test_fsdp.py` starts both and reads the results of rank 0.

Arguments: a file for the rendezvous of the two ranks, a file for the results, and a folder for the Trainer.
RANK and WORLD_SIZE are in the environment.
"""

import os
import sys
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from transformers import Trainer, TrainingArguments

from toys import CASES, mixed_model

BALANCE_WEIGHT = 8.0  # makes the balance loss as large as the cross-entropy, so that double counting is detected


def model_of(case: str) -> Any:
    """Return a toy model in training mode, with a large weight of the balance loss if it has one."""
    mixers = dict(CASES[case])
    if "mixture" in mixers:
        mixers["mixture"] = mixers["mixture"] | {"balance_weight": BALANCE_WEIGHT}
    return mixed_model("Llama", mixers).train()


def batch() -> dict[str, torch.Tensor]:
    """Return eight sequences with different numbers of labels; two are padded."""
    input_ids = torch.randint(1, 61, (8, 9), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(input_ids)
    mask[1, :4] = mask[6, 5:] = 0
    labels = input_ids.masked_fill(mask == 0, -100)
    labels[0, :6] = labels[3, 2:] = labels[5, 4:6] = -100
    return {"input_ids": input_ids * mask, "attention_mask": mask, "labels": labels}


def part(index: int, count: int) -> dict[str, torch.Tensor]:
    """Return one of `count` equal parts of the batch, with the number of predicted tokens of the whole batch."""
    items = batch()["labels"][:, 1:].ne(-100).sum()
    return {name: tensor.chunk(count)[index] for name, tensor in batch().items()} | {"num_items_in_batch": items}


def plain(case: str, count: int) -> dict[str, Any]:
    """Run one process on the batch in `count` parts; return the sum of the losses and its gradients."""
    model = model_of(case)
    loss = sum(model(**part(index, count), use_cache=False).loss for index in range(count))
    loss.backward()
    return {"loss": loss.detach(), "gradients": {name: x.grad for name, x in model.named_parameters()}}


def sharded(case: str, rank: int, checkpointing: bool, backbone_too: bool = False) -> dict[str, Any]:
    """Run FSDP2 with half of the batch per rank; return the sum of both losses and the full gradients."""
    model = model_of(case)
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
    for module in [*model.model.layers, *([model.model] if backbone_too else []), model]:
        fully_shard(module)
    try:
        loss = model(**part(rank, 2), use_cache=False).loss
    except RuntimeError as error:
        return {"error": str(error)}
    (2 * loss).backward()  # FSDP averages gradients over the two ranks; the Trainer corrects for this in the same way
    total = loss.detach().clone()
    distributed.all_reduce(total)
    return {"loss": total, "gradients": {name: x.grad.full_tensor() for name, x in model.named_parameters()}}


def data_parallel(case: str, folder: str, accumulation: int) -> dict[str, Any]:
    """Run one optimizer step of the Trainer on both ranks; return the loss and the applied gradients."""
    model = model_of(case)
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        max_steps=1,
        logging_steps=1,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        per_device_train_batch_size=4 // accumulation,
        gradient_accumulation_steps=accumulation,
        train_sampling_strategy="sequential",
    )
    dataset = [{name: tensor[row] for name, tensor in batch().items()} for row in range(8)]
    trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer.train()
    return {
        "wrapper": type(trainer.model_wrapped).__name__,
        "loss": trainer.state.log_history[0]["loss"],
        "gradients": {name: before[name] - x.detach() for name, x in model.named_parameters()},
    }


def main(meeting_point: str, results_file: str, folder: str) -> None:
    """Run every case and save the results on rank 0."""
    rank = int(os.environ["RANK"])
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    results: dict[Any, Any] = {}
    for case in CASES:
        for count in (1, 2, 4):
            results["plain", case, count] = plain(case, count)
        for checkpointing in (False, True):
            results["sharded", case, checkpointing] = sharded(case, rank, checkpointing)
        for accumulation in (1, 2):
            results["data parallel", case, accumulation] = data_parallel(case, folder, accumulation)
    results["backbone"] = sharded("mixture", rank, checkpointing=False, backbone_too=True)
    if rank == 0:
        torch.save(results, results_file)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
