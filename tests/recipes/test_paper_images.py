"""The paper's recipe of a vision transformer has the model and the augmentations of the paper and of its code."""

import pytest

from crosshead.recipes.schema.load import load_recipe

RECIPE = load_recipe("papers/moh_vit_s")
CONFIG = RECIPE.model.config


def test_the_model_is_transnext_small_with_the_heads_of_the_published_configuration():
    sizes = {
        "hidden_sizes": [72, 144, 288, 576],
        "num_attention_heads": [3, 6, 12, 24],
        "depths": [5, 5, 22, 5],
        "image_size": 224,
        "num_labels": 1000,
    }
    assert {key: CONFIG[key] for key in sizes} == sizes
    assert CONFIG["mixers"] == {
        "mixture": {
            "active_heads": [3] * 5 + [6] * 5 + [9] * 22 + [16] * 5,
            "shared_heads": [3] * 5 + [6] * 5 + [3] * 22 + [4] * 5,
            "router": "two_stage",
            "gate": "weighted",
            "balance_weight": 0.01,
        }
    }


def test_three_quarters_of_the_heads_are_active():
    """Mixture-of-Head, table 1."""
    heads = sum(heads * depth for heads, depth in zip(CONFIG["num_attention_heads"], CONFIG["depths"], strict=True))
    assert sum(CONFIG["mixers"]["mixture"]["active_heads"]) / heads == pytest.approx(0.75, abs=0.01)


def test_augmentations_are_those_of_the_published_code():
    """Appendix B.1 names them: random augmentation, mixup, CutMix, random erasing, label smoothing and drop path."""
    settings = {"label_smoothing": 0.1, "mixup": 0.8, "cutmix": 1.0, "operations": 2, "magnitude": 9, "erasing": 0.25}
    assert {key: getattr(RECIPE.objective, key) for key in settings} == settings
    assert RECIPE.objective.crop == 0.08 and RECIPE.objective.flip and CONFIG["drop_path_rate"] == 0.45
