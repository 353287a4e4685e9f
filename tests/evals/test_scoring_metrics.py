"""Metrics and their standard errors against scikit-learn, scipy and a jackknife in a loop."""

import math
import tracemalloc

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, log_loss, matthews_corrcoef

from crosshead.evals.harness.scores import difference
from crosshead.evals.scoring.metrics import class_scores, token_scores, value_scores

COUNT = 31


def random_classes(classes, seed=0):
    """Return random labels, and predictions that are often right."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(classes, size=COUNT)
    return labels, np.where(generator.random(COUNT) < 0.6, labels, generator.integers(classes, size=COUNT))


def random_values(seed=0):
    """Return two correlated samples with ties."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 6, size=COUNT) / 2
    return labels, np.round(labels + generator.normal(size=COUNT), 1)


def jackknife_error(metric, labels, predictions):
    subsets = [np.arange(COUNT) != index for index in range(COUNT)]
    estimates = np.array([metric(labels[each], predictions[each]) for each in subsets])
    return math.sqrt((COUNT - 1) / COUNT * ((estimates - estimates.mean()) ** 2).sum())


def check_against_jackknife(scores, truth, labels, predictions):
    assert scores.keys() == truth.keys()
    for name, metric in truth.items():
        assert scores[name].value == pytest.approx(metric(labels, predictions), abs=1e-12), name
        expected = jackknife_error(metric, labels, predictions)
        assert scores[name].items.standard_error() == pytest.approx(expected, abs=1e-12), name


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_class_scores_match_sklearn(classes, seed):
    labels, predictions = random_classes(classes, seed)
    losses = torch.zeros(COUNT).double()
    results = class_scores(losses, torch.tensor(predictions), torch.tensor(labels), classes)
    scores = {score.metric: score for score in results if score.metric != "loss"}
    name, average = ("f1", "binary") if classes == 2 else ("macro_f1", "macro")
    truth = {
        "accuracy": accuracy_score,
        name: lambda labels, predictions: f1_score(labels, predictions, average=average, zero_division=0),
        "matthews_correlation": matthews_corrcoef,
    }
    check_against_jackknife(scores, truth, labels, predictions)


@pytest.mark.parametrize("seed", [0, 1])
def test_value_scores_match_scipy(seed):
    labels, predictions = random_values(seed)
    scores = {score.metric: score for score in value_scores(torch.tensor(predictions), torch.tensor(labels))}
    truth = {"pearson": lambda *sides: pearsonr(*sides)[0], "spearman": lambda *sides: spearmanr(*sides)[0]}
    check_against_jackknife(scores, truth, labels, predictions)


def test_loss_matches_sklearn():
    generator = np.random.default_rng(0)
    chances = generator.dirichlet(np.ones(3), size=COUNT)
    labels = generator.integers(3, size=COUNT)
    losses = -np.log(chances[np.arange(COUNT), labels])
    *_, loss = class_scores(torch.tensor(losses), torch.tensor(chances.argmax(1)), torch.tensor(labels), 3)
    assert loss.value == pytest.approx(log_loss(labels, chances, labels=range(3)))
    assert loss.items.standard_error() == pytest.approx(losses.std(ddof=1) / math.sqrt(COUNT))
    assert (loss.metric, loss.higher_is_better) == ("loss", False)


@pytest.mark.parametrize(("labels", "predictions"), [([0, 1, 1], [1, 1, 1]), ([1, 1, 1], [1, 1, 1]), ([0], [1])])
def test_class_scores_of_constant_predictions(labels, predictions):
    results = class_scores(torch.zeros(len(labels)).double(), torch.tensor(predictions), torch.tensor(labels), 2)
    scores = {score.metric: score.value for score in results}
    assert scores["f1"] == pytest.approx(f1_score(labels, predictions, zero_division=0))
    assert scores["matthews_correlation"] == 0


def test_constant_values_have_zero_correlation():
    results = value_scores(torch.full((5,), 0.1).double(), torch.arange(5.0).double())
    assert [(score.value, score.items.standard_error()) for score in results] == [(0, 0), (0, 0)]


def test_token_scores_and_standard_errors():
    """Scores are means over tokens; the units of the standard error are windows."""
    losses, hits, tokens = torch.tensor([6.0, 2.0, 9.0]), torch.tensor([1.0, 2.0, 0.0]), torch.tensor([3, 2, 4])
    loss, perplexity, accuracy = token_scores(losses.double(), hits.double(), tokens)
    assert loss.value == pytest.approx(17 / 9) and perplexity.value == pytest.approx(math.exp(17 / 9))
    assert accuracy.value == pytest.approx(3 / 9) and not accuracy.items.binary
    residuals = losses.numpy() - 17 / 9 * tokens.numpy()
    error = math.sqrt((residuals**2).sum() * 3 / 2) / 9
    assert loss.items.standard_error() == pytest.approx(error)
    assert perplexity.items.standard_error() == pytest.approx(error * math.exp(17 / 9))


def test_difference_of_correlations_is_paired():
    labels, predictions = random_values()
    others = np.round(predictions + np.random.default_rng(5).normal(size=COUNT, scale=0.1), 1)
    sides = [value_scores(torch.tensor(each), torch.tensor(labels)) for each in (predictions, others)]
    for first, second, metric in zip(*sides, (pearsonr, spearmanr), strict=True):
        result = difference(first.items, second.items, True)

        def change(labels, rows, metric=metric):
            return metric(labels, rows[:, 1])[0] - metric(labels, rows[:, 0])[0]

        rows = np.stack([predictions, others], axis=1)
        assert result["change"] == pytest.approx(change(labels, rows), abs=1e-12)
        error = jackknife_error(change, labels, rows)
        reach = (result["interval"][1] - result["interval"][0]) / 2
        assert reach == pytest.approx(2.0423 * error, rel=1e-4) and error < first.items.standard_error() / 2
        assert result["items_that_differ"] == int((predictions != others).sum()) < COUNT
        assert difference(first.items, first.items, True)["verdict"] == "equal"


def test_correlations_need_less_than_quadratic_memory():
    rows = 2000
    predictions, labels = torch.randn(2, rows, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tracemalloc.start()
    value_scores(predictions, labels)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < rows**2 / 2
