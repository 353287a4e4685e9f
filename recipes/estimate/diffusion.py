"""Parameter counts, FLOPs and GPU memory of training a diffusion transformer; activations are not estimated."""

import torch

from crosshead.common.errors import RecipeError
from crosshead.evals.cost.counting import FLOPS, TRAINING_PASSES, multiplications, parameter_counts

from ..schema.model_config import model_config, named_model_config
from ..schema.recipe import Recipe
from ..trainer.objectives import objective_of
from ..trainer.parameters import set_trainable
from .memory import ALONE, COPIES, FLOAT32, MOMENTS, Memory, Sharding


def diffusion_estimate(recipe: Recipe, sharding: Sharding) -> tuple[dict[str, int], dict[str, int], Memory]:
    """Return the size of each trained parameter, the counts of parameters and FLOPs, and the memory per GPU."""
    if sharding.kind not in (ALONE, COPIES):
        raise RecipeError(f"the objective {recipe.objective.name} is not possible with {sharding.kind}")
    objective, config = objective_of(recipe), model_config(recipe.model.config or {}, recipe.objective)
    with torch.device("meta"), named_model_config():
        model = objective.new_model(config)
        inputs = objective.example(config, 1)
    flops = TRAINING_PASSES * FLOPS * multiplications(lambda: model(**inputs))
    counted = parameter_counts(model)
    stored = counted["parameters"]
    parameters = {
        name: part for name, part in set_trainable(model, recipe.train).named_parameters() if part.requires_grad
    }
    trained = {name: part.numel() for name, part in parameters.items()}
    total = sum(trained.values()) * FLOAT32
    in_half = (
        sum(part.numel() for part in parameters.values() if part.ndim == 2) if recipe.train.dtype == "bfloat16" else 0
    )
    return (
        trained,
        {
            "parameters": stored,
            "new_parameters": counted["new_parameters"],
            "training_flops_per_sample": flops,
            "training_flops": flops * recipe.steps * recipe.per_step,
        },
        Memory(
            weights=stored * FLOAT32,
            gradients=total,
            moments=total * MOMENTS,
            average=total if recipe.train.average else 0,
            working_copies=in_half * torch.bfloat16.itemsize,
            gradient_buckets=total if sharding.kind == COPIES else 0,
            teacher=0,
            activations=0,
            logits=0,
        ),
    )
