"""Table of the training objectives by their names in a recipe."""

from ..schema.recipe import Recipe
from .image_objective import Classes
from .noise_objective import Noise
from .objective import Objective
from .text_objectives import MaskedTokens, NextToken, Spans

OBJECTIVES: dict[str, type[Objective]] = {
    "next_token": NextToken,
    "masked_tokens": MaskedTokens,
    "spans": Spans,
    "classes": Classes,
    "noise": Noise,
}


def objective_of(recipe: Recipe) -> Objective:
    """Return the objective of a recipe."""
    return OBJECTIVES[recipe.objective.name](recipe)
