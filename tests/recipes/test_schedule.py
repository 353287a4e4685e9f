"""The learning rate of every step against values computed by hand."""

import pytest

from crosshead.recipes.trainer.parameters import learning_rate_factor
from toy_training import KNOCKING, metrics, toy_run, train


def recipe_of(tmp_path, steps=9, **train):
    standard = {"learning_rate": 0.01, "final_ratio": 0.2, "warmup": 4.0}
    return toy_run(KNOCKING, tmp_path, steps, train=standard | train)


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        # Four steps up; then from 1 to 0.2 along half a cosine, of which the last four steps make a quarter each.
        ({}, [0.25, 0.5, 0.75, 1, 1, 0.8828427, 0.6, 0.3171573, 0.2]),
        ({"schedule": "constant"}, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1]),
        ({"warmup": 0.0, "final_ratio": 0.0, "steps": 5}, [1, 0.8535534, 0.5, 0.1464466, 0]),
        ({"warmup": 0.4, "steps": 5}, [0.5, 1, 1, 0.6, 0.2]),
        ({"warmup_from": 0.006, "schedule": "constant", "steps": 5}, [0.7, 0.8, 0.9, 1, 1]),
        ({"warmup": 0.0, "schedule": "constant", "steps": 2}, [1, 1]),
        ({"warmup": 1.0, "steps": 2}, [1, 1]),
    ],
)
def test_learning_rate_factors_equal_hand_computed_values(train, expected, tmp_path):
    recipe = recipe_of(tmp_path, **train)
    assert [learning_rate_factor(recipe, step) for step in range(recipe.steps)] == pytest.approx(expected, abs=1e-6)


def test_learning_rate_after_last_step_is_final_ratio(tmp_path):
    """The scheduler also asks for the learning rate of one step after the last."""
    recipe = recipe_of(tmp_path)
    assert learning_rate_factor(recipe, recipe.steps) == pytest.approx(0.2)


def test_optimizer_uses_scheduled_learning_rate(tmp_path):
    recipe = recipe_of(tmp_path, steps=4, warmup=2.0)
    train(recipe)
    rates = [line["learning_rate"] for line in metrics(recipe) if "loss" in line]
    # The rate that a step has used is logged after the step.
    assert rates == pytest.approx([0.01 * learning_rate_factor(recipe, step) for step in range(4)])
