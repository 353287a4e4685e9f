"""Convert a recipe to transformers' `TrainingArguments`."""

from typing import Any

import torch

from crosshead.common.errors import RecipeError

from ..schema.recipe import Recipe


def accumulation_steps(recipe: Recipe, processes: int) -> int:
    """Return the gradient accumulation steps: micro batches per process and step; `RecipeError` if not whole."""
    at_once = recipe.train.micro_batch * processes
    if recipe.batch_size % at_once:
        raise RecipeError(
            f"a step of {recipe.batch_size} sequences cannot be divided among {processes} processes with "
            f"train.micro_batch={recipe.train.micro_batch}: change one of them"
        )
    return recipe.batch_size // at_once


def training_arguments(recipe: Recipe) -> Any:
    """Return the Trainer's arguments; `RunTrainer` overrides sampling order, schedule and checkpoints."""
    from accelerate.utils import parse_flag_from_env
    from transformers import TrainingArguments
    from transformers.integrations.integration_utils import get_available_reporting_integrations

    train, watch = recipe.train, recipe.watch
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    trackers = get_available_reporting_integrations()
    for name in watch.report_to:
        if name not in trackers:
            installed = ", ".join(trackers) or "none"
            raise RecipeError(
                f"watch.report_to: the tracker {name!r} is not installed, only {installed}: `pip install {name}`"
            )
    arguments = TrainingArguments(
        output_dir=recipe.output,
        max_steps=recipe.steps,
        per_device_train_batch_size=train.micro_batch,
        per_device_eval_batch_size=train.micro_batch,
        learning_rate=train.learning_rate,
        weight_decay=train.weight_decay,
        adam_beta1=train.betas[0],
        adam_beta2=train.betas[1],
        adam_epsilon=train.eps,
        max_grad_norm=train.gradient_clipping,
        bf16=train.dtype == "bfloat16",
        seed=train.seed,
        logging_steps=watch.every,
        logging_nan_inf_filter=False,  # keep nan and inf visible: they end the run
        save_strategy="steps",
        save_steps=recipe.checkpoints.every,
        eval_strategy="steps" if recipe.evaluates else "no",
        eval_steps=watch.evaluate_every or recipe.steps,  # the Trainer always evaluates after the last step
        report_to=list(watch.report_to) or "none",
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=on_cpu,  # by default, a distributed run on CPUs would see one process
        dataloader_num_workers=recipe.data.workers,
        dataloader_pin_memory=not on_cpu,
        ignore_data_skip=True,  # the sampler itself starts at the checkpoint's sample
        ddp_find_unused_parameters=False,
        # With FSDP2, reduce gradients after each micro batch: otherwise every GPU stores unsharded gradients until the
        # last micro batch.
        accelerator_config={
            "gradient_accumulation_kwargs": {"sync_each_batch": parse_flag_from_env("ACCELERATE_USE_FSDP")}
        },
    )
    arguments.mixed_precision = "bf16" if train.dtype == "bfloat16" else "no"  # overrides accelerate's configuration
    if arguments.n_gpu > 1:
        raise RecipeError(
            f"one process sees {arguments.n_gpu} GPUs: start one for each with `accelerate launch --num_processes "
            f"{arguments.n_gpu} -m crosshead train`, or name one in CUDA_VISIBLE_DEVICES"
        )
    if arguments.device.type == "cpu":  # older versions of transformers cannot load a checkpoint to "cpu:0"
        arguments._setup_devices = torch.device("cpu")
    arguments.gradient_accumulation_steps = accumulation_steps(recipe, arguments.world_size)
    return arguments
