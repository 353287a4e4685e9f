"""The loss of a diffusion model against the papers' formulas in float64, and DiT's initial values."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributions import Normal, kl_divergence

pytest.importorskip("diffusers")

from diffusers import DDPMScheduler, DiTTransformer2DModel

from crosshead.modeling.dit import CrossheadDiTTransformer2DModel
from crosshead.recipes.trainer.dit_model import initialise, save_model, share_embeddings
from crosshead.recipes.trainer.noise_loss import NoiseLoss, noise_schedule, pixel_log_likelihood
from dit_toys import LABELS, MIXTURE, SIZES, TIMES

STEPS = 1000
BETAS = [1e-4 + (0.02 - 1e-4) * step / (STEPS - 1) for step in range(STEPS)]
CUMULATIVE = [math.prod(1 - beta for beta in BETAS[: step + 1]) for step in range(STEPS)]
DRAWS = torch.Generator().manual_seed(5)
SHAPE = (5, 2, 4, 4)
STEPS_TESTED = torch.tensor([0, 1, 37, 500, 999])
CLEAN = (torch.randint(256, SHAPE, generator=DRAWS).float() / 127.5 - 1).index_fill(2, torch.tensor([0]), -1.0)
NOISE = torch.randn(SHAPE, generator=DRAWS)


def expected_loss(prediction: torch.Tensor, clean: torch.Tensor, noise: torch.Tensor, step: int) -> float:
    """Return the loss of one image in float64, element by element, by the equations of DDPM and Improved DDPM."""
    predicted, fractions = (
        prediction.double().chunk(2) if len(prediction) > len(clean) else (prediction.double(), None)
    )
    alpha, signal = 1 - BETAS[step], CUMULATIVE[step]
    total = 0.0
    for index, x in enumerate(clean.double().flatten().tolist()):
        error, e = noise.double().flatten()[index].item(), predicted.flatten()[index].item()
        total += (e - error) ** 2
        if fractions is None:
            continue
        noisy = math.sqrt(signal) * x + math.sqrt(1 - signal) * error
        share = (fractions.flatten()[index].item() + 1) / 2
        # Equation 15 of Improved DDPM; the first step takes the next one's posterior variance, since its own is zero.
        log_variance = share * math.log(BETAS[step]) + (1 - share) * math.log(posterior(max(step, 1), x, noisy)[1])
        mean = (noisy - BETAS[step] / math.sqrt(1 - signal) * e) / math.sqrt(alpha)  # equation 11 of DDPM
        if step == 0:
            total -= math.log2(bin_probability(x, mean, math.exp(log_variance / 2)))
        else:
            true_mean, true_variance = posterior(step, x, noisy)
            deviations = [torch.tensor(math.sqrt(each)).double() for each in (true_variance, math.exp(log_variance))]
            true, model = (Normal(m, s) for m, s in zip((true_mean, mean), deviations, strict=True))
            total += kl_divergence(true, model).item() / math.log(2)
    return total / clean.numel()


def posterior(step: int, x: float, noisy: float) -> tuple[float, float]:
    """Return the mean and variance of the image before a step, by Bayes' rule."""
    before, alpha, beta = CUMULATIVE[step - 1], 1 - BETAS[step], BETAS[step]
    precision = 1 / (1 - before) + alpha / beta
    return (math.sqrt(before) / (1 - before) * x + math.sqrt(alpha) / beta * noisy) / precision, 1 / precision


def bin_probability(x: float, mean: float, deviation: float) -> float:
    """Return the probability of a pixel's bin: equation 13 of DDPM."""
    low = -math.inf if x < -0.9999 else x - 1 / 255
    high = math.inf if x > 0.9999 else x + 1 / 255
    return (math.erf((high - mean) / deviation / math.sqrt(2)) - math.erf((low - mean) / deviation / math.sqrt(2))) / 2


def prediction_near_noise(channels: int) -> torch.Tensor:
    """Return predicted noise with small errors, and variance outputs between and beyond their bounds."""
    drawn = torch.randn(5, 2 * channels, 4, 4, generator=torch.Generator().manual_seed(6))
    return torch.cat([NOISE + 0.3 * drawn[:, :channels], 0.7 * drawn[:, channels:]], dim=1)


def new_model(config: dict[str, Any], seed: int) -> Any:
    torch.manual_seed(seed)
    model = CrossheadDiTTransformer2DModel(**config)
    initialise(model)
    return model


@pytest.mark.parametrize("learns_variance", [False, True])
def test_noise_loss_equals_paper_formulas(learns_variance: bool) -> None:
    prediction = prediction_near_noise(2)[:, : 4 if learns_variance else 2]
    losses = NoiseLoss(noise_schedule())(prediction, CLEAN, NOISE, STEPS_TESTED)
    parts = zip(prediction, CLEAN, NOISE, STEPS_TESTED.tolist(), strict=True)
    expected = torch.tensor([expected_loss(*part) for part in parts])
    torch.testing.assert_close(losses, expected, rtol=2e-4, atol=1e-6)
    assert (expected > 0.05).all()


def test_variational_bound_has_no_gradient_for_predicted_noise() -> None:
    prediction = prediction_near_noise(2).requires_grad_()
    NoiseLoss(noise_schedule())(prediction, CLEAN, NOISE, STEPS_TESTED).sum().backward()
    assert prediction.grad is not None
    noise, variances = prediction.grad.chunk(2, dim=1)
    torch.testing.assert_close(noise, 2 * (prediction[:, :2] - NOISE).detach() / CLEAN[0].numel())
    assert (variances != 0).flatten(1).all(1).all()


def test_exact_noise_and_variance_have_zero_loss() -> None:
    """At the lower variance bound, the model's step equals the posterior, except in the first step."""
    exact = torch.cat([NOISE, -torch.ones_like(NOISE)], dim=1)
    losses = NoiseLoss(noise_schedule())(exact, CLEAN, NOISE, STEPS_TESTED)
    assert losses[0] > 0 and losses[1:].abs().max() < 1e-6


def test_pixel_probabilities_add_up_to_one() -> None:
    pixels = torch.arange(256).float() / 127.5 - 1
    for mean, deviation in ((-0.97, 0.01), (0.2, 0.3), (1.1, 0.05)):
        probabilities = pixel_log_likelihood(pixels, torch.tensor(mean), torch.tensor(math.log(deviation))).exp()
        assert probabilities.sum().item() == pytest.approx(1, abs=1e-5)


def test_noisy_images_equal_diffusers() -> None:
    noised = NoiseLoss(noise_schedule()).schedule.add_noise(CLEAN, NOISE, STEPS_TESTED)
    assert torch.equal(noised, DDPMScheduler().add_noise(CLEAN, NOISE, STEPS_TESTED))
    signal = torch.tensor(CUMULATIVE)[STEPS_TESTED].view(-1, 1, 1, 1)
    torch.testing.assert_close(noised, signal.sqrt() * CLEAN + (1 - signal).sqrt() * NOISE, rtol=1e-4, atol=1e-5)


def test_initial_values_equal_dit_initialisation() -> None:
    config = SIZES | {"attention_head_dim": 64, "mixers": MIXTURE}
    model = new_model(config, seed=3)
    noisy = torch.randn(2, 3, 6, 6)
    assert model(noisy, TIMES, LABELS).sample.abs().max() == 0  # the last map is zero
    block, width = model.transformer_blocks[1], 4 * 64
    tokens = torch.randn(2, 9, width)
    assert torch.equal(block(tokens, timestep=TIMES, class_labels=LABELS), tokens)  # a block starts as the identity
    limits = {"attn1.to_q": 4, "attn1.to_out.0": 2, "ff.net.0.proj": 5, "ff.net.2": 5}
    for name, widths in limits.items():  # the widths of inputs and outputs, those of query, key and value together
        layer = block.get_submodule(name)
        assert layer.weight.abs().max().item() == pytest.approx(math.sqrt(6 / (widths * width)), rel=1e-3)
        assert layer.bias.abs().max() == 0
    patch = model.pos_embed.proj
    assert patch.weight.abs().max().item() == pytest.approx(math.sqrt(6 / (3 * 2 * 2 + width)), rel=1e-2)
    for embedding in (block.norm1.emb.timestep_embedder.linear_2, block.norm1.emb.class_embedder.embedding_table):
        assert embedding.weight.std().item() == pytest.approx(0.02, rel=0.1)
    again = new_model(config, seed=3).state_dict()
    assert all(torch.equal(part, again[name]) for name, part in model.state_dict().items())
    routers = [part for name, part in model.named_parameters() if ".mixers." in name]
    assert routers and all(0.01 < part.std() < 0.03 for part in routers)


def test_shared_embedding_is_saved_in_every_block(tmp_path: Path) -> None:
    model = new_model(SIZES | {"mixers": MIXTURE}, seed=0)
    own = sum(part.numel() for part in model.parameters())
    embedding = sum(part.numel() for part in model.transformer_blocks[0].norm1.emb.parameters())
    share_embeddings(model)
    assert sum(part.numel() for part in model.parameters()) == own - embedding
    with torch.no_grad():
        for index, part in enumerate(model.parameters()):
            part += 0.1 * torch.randn(part.shape, generator=torch.Generator().manual_seed(index))
    noisy = torch.randn(2, 3, 6, 6)
    expected = model.train()(noisy, TIMES, LABELS).sample
    assert torch.equal(model.train()(noisy, TIMES, LABELS).sample, expected)  # no label is dropped by chance
    save_model(model, tmp_path)
    assert torch.equal(model(noisy, TIMES, LABELS).sample, expected)
    assert sum(part.numel() for part in model.parameters()) == own - embedding
    loaded = CrossheadDiTTransformer2DModel.from_pretrained(tmp_path).eval()
    assert isinstance(loaded, DiTTransformer2DModel)
    assert sum(part.numel() for part in loaded.parameters()) == own
    assert torch.equal(loaded(noisy, TIMES, LABELS).sample, expected)
