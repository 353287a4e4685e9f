"""Training settings of the papers' recipes against numbers copied from the papers' tables and sections.

Batch sizes are as printed; those of the recipes are close to them and consist of whole sequences. Settings that a
paper does not give are left out.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import pytest

from crosshead.recipes.schema.recipe import load_recipe, shipped_recipes
from crosshead.recipes.trainer.parameters import learning_rate_factor

BILLION = 1_000_000_000


@dataclass(frozen=True)
class Settings:
    """Settings that a paper gives for one training."""

    tokens: int
    batch: float
    """Tokens per step, as printed."""
    learning_rate: float | None = None
    lowest: float | None = None
    """Learning rate at the end of training."""
    warmup: float | None = None
    """Number of warmup steps, or their fraction of all steps."""
    decay: float | None = None
    clipping: float | None = None
    length: int | None = None
    weights: dict[str, float] = field(default_factory=dict)
    """Sampling weights of the data sources, by name."""
    train: dict[str, Any] = field(default_factory=dict)
    """Other fields of the recipe's `train` section."""
    objective: str = "next_token"


KHA = Settings(  # Knocking-Heads, section 4.1, the exploratory experiments; tokens: tables 3 and 5
    tokens=100 * BILLION,
    batch=2.1e6,
    learning_rate=7.5e-4,
    lowest=7.5e-5,
    warmup=0.05,
    decay=0.01,
    clipping=1.0,
    length=4096,
    train={"betas": (0.9, 0.95), "schedule": "cosine"},
)
QWEN = Settings(  # Explicit Attention, section 5.2.1, appendix C
    tokens=22 * BILLION,
    batch=68e6,
    learning_rate=1.6e-5,
    lowest=0.0,
    warmup=32,  # the paper: 1000 steps, of which 22B tokens have 323
    train={"schedule": "cosine"},
)
TABLE_D = {  # Mixture-of-Head
    "book": 4.24,
    "wikipedia": 3.50,
    "arxiv": 4.37,
    "stackexchange": 3.19,
    "c4": 10.94,
    "dolma": 61.28,
    "pile": 12.48,
}
MOH = Settings(  # Mixture-of-Head, appendix B.3, tables D and E: the small one
    tokens=100 * BILLION,
    batch=4e6,
    learning_rate=3e-4,
    lowest=3e-5,
    warmup=2000,
    decay=0.1,
    clipping=1.0,
    length=2048,
    weights=TABLE_D,
    train={"warmup_from": 1e-7},
)
IMAGENET = 1_281_167
MOH_VIT = Settings(  # Mixture-of-Head, appendix B.1: 300 epochs, 5 of warmup; published code: 8 x 128 images, to 1e-5
    tokens=300 * IMAGENET,
    batch=8 * 128,
    learning_rate=1e-3,
    lowest=1e-5,
    warmup=round(5 * IMAGENET / 1024),
    decay=0.05,
    clipping=1.0,
    train={"warmup_from": 1e-6, "schedule": "cosine"},
    objective="classes",
)
SETTINGS = {
    "papers/kha_dense_0.61b": KHA,
    "papers/kha_dense_1.68b": KHA,
    "papers/kha_dense_3.94b": KHA,
    "papers/kha_moe_a0.8b_6.6b": KHA,
    "papers/mea_1b": Settings(  # Explicit Attention, sections 5.1.1 to 5.1.3
        tokens=500 * BILLION,
        batch=20e6,
        learning_rate=3e-3,
        lowest=3e-4,
        warmup=1000,
        decay=0.1,
        train={"schedule": "cosine"},
    ),
    "papers/mea_1b_sweep": Settings(  # Explicit Attention, section 5.1.2, figure 2
        tokens=50 * BILLION,
        batch=20e6,
        learning_rate=1e-3,
        lowest=1e-3,
        warmup=1000,
        decay=0.1,
        train={"schedule": "constant"},
    ),
    "papers/mea_qwen3_30b_deep": QWEN,
    "papers/mea_qwen3_30b_full": QWEN,
    "papers/mea_qwen3_30b_half": QWEN,
    "papers/mea_qwen3_30b_full_recovery": Settings(  # Explicit Attention, section 5.2.1, appendix C
        tokens=1000 * BILLION,
        batch=68e6,
        learning_rate=1.6e-5,
        lowest=0.0,
        warmup=1000,
        train={"schedule": "cosine"},
    ),
    "papers/moh_llm_s": MOH,
    "papers/moh_llm_b": Settings(  # Mixture-of-Head, appendix B.3, tables D and E
        tokens=100 * BILLION,
        batch=4e6,
        learning_rate=5e-4,
        lowest=5e-5,
        warmup=500,
        decay=0.1,
        clipping=1.0,
        length=2048,
        weights=TABLE_D,
        train={"warmup_from": 1e-7},
    ),
    "papers/moh_llama3_8b_stage1": Settings(  # Mixture-of-Head, appendix B.4, table F
        tokens=300 * BILLION,
        batch=16e6,
        learning_rate=6e-5,
        lowest=6e-6,
        warmup=50,
        decay=0.1,
        clipping=1.0,
        length=8192,
    ),
    "papers/moh_dit_xl_2": Settings(  # Mixture-of-Head, section 4.2 and table 2; in images
        tokens=7_000_000 * 256,
        batch=256,
        learning_rate=1e-4,
        lowest=1e-4,
        decay=0.0,
        train={"schedule": "constant", "average": 0.9999},
        objective="noise",
    ),
    "papers/moh_vit_s": MOH_VIT,
    "papers/talking_albert_base": Settings(  # Talking-Heads, section 7.2, and Lan et al. 2019, section 4.1
        tokens=125_000 * 4096 * 512, batch=4096 * 512, length=512, objective="masked_tokens"
    ),
    "papers/talking_t5_base": Settings(  # Talking-Heads, section 7.1
        tokens=524_288 * 128 * 512, batch=128 * 512, length=512, objective="spans"
    ),
    "papers/moh_llama3_8b_stage2": Settings(  # the same
        tokens=100 * BILLION,
        batch=16e6,
        learning_rate=2e-5,
        lowest=1e-6,
        warmup=50,
        decay=0.1,
        clipping=1.0,
        length=8192,
    ),
}

DEVIATIONS = {
    "warmup: 32": "Section 5.2.1 says 1000 steps",
    "batch_tokens: 19_922_944": "section 5.1.1: 20M, here",
    "batch_tokens: 68_157_440": "section 5.2.1: 68M, here",
    "weight_decay: 0.01 #": "the paper says Adam",
    "learning_rate: 5e-4\n": "the rate is a choice of ours",
    "rope_theta: 10000.0": "rope_theta: 10000.0} # not given in the paper",
}
"""Text of a recipe's value that deviates from the paper -> text by which the recipe must say so."""


def test_every_paper_recipe_has_settings_here():
    assert set(SETTINGS) == {name for name in shipped_recipes() if name.startswith("papers/")}


@pytest.mark.parametrize("name", SETTINGS)
def test_training_settings_equal_papers(name):
    recipe, paper = load_recipe(name), SETTINGS[name]
    train = recipe.train
    assert train.trainable == "all" and recipe.distillation is None
    assert recipe.total == paper.tokens
    assert recipe.per_step == pytest.approx(paper.batch, rel=0.05)  # 4M is 4,194,304
    assert paper.learning_rate in (None, train.learning_rate) and paper.warmup in (None, train.warmup)
    lowest = learning_rate_factor(recipe, recipe.steps - 1) * train.learning_rate
    assert paper.lowest is None or lowest == pytest.approx(paper.lowest, rel=1e-2, abs=1e-9)
    assert recipe.objective.name == paper.objective
    assert {key: getattr(train, key) for key in paper.train} == paper.train
    assert paper.decay in (None, train.weight_decay)
    assert paper.clipping in (None, train.gradient_clipping)
    assert paper.length in (None, recipe.data.length)
    if paper.weights:
        assert {source.path.rpartition("/")[2]: source.weight for source in recipe.data.sources} == paper.weights


def test_sweep_rates_equal_paper():
    """Learning rates of Explicit Attention, section 5.1.2."""
    assert load_recipe("papers/mea_1b_sweep").sweep.learning_rates == (1e-4, 5e-4, 1e-3, 3e-3)


def test_recovery_stage_uses_data_of_model_from_scratch():
    """Data of the recovery stage in Explicit Attention, appendix C."""
    recovery, scratch = (load_recipe(f"papers/{name}") for name in ("mea_qwen3_30b_full_recovery", "mea_1b"))
    assert recovery.data.sources == scratch.data.sources


@pytest.mark.parametrize("name", SETTINGS)
def test_values_not_given_in_papers_are_marked(name):
    """Recipes mark values that no paper gives, and state their deviations."""
    text = shipped_recipes()[name].read_text(encoding="utf-8")
    assert "not given in the paper" in text
    for deviation, words in DEVIATIONS.items():
        if deviation in text:
            assert words in text, deviation


@pytest.mark.parametrize("name", SETTINGS)
def test_numbers_in_recipes_have_source_comments(name):
    """A number has a comment beside it, in its section's header, above it, or on a line that covers the next ones."""
    text = shipped_recipes()[name].read_text(encoding="utf-8")
    for part in ("config", "train"):
        head, *lines = re.search(rf"^ *{part}:.*\n(?:^ +.*\n|^\n)*", text, re.MULTILINE).group().splitlines()
        covered, numbers = "#" in head, 0
        for line in lines:
            value, comment = line.partition("#")[::2]
            covered |= bool(comment) and ("next one" in comment or not value.strip())
            if re.search(r": *[\d.]", value):
                numbers += 1
                assert covered or comment, line
        assert numbers >= 5 or part == "config"
