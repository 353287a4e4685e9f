"""TransNeXt: published tensor names and sizes, saving and loading, refused configurations."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from crosshead import (
    MECHANISMS,
    CrossheadTransNextConfig,
    CrossheadTransNextForImageClassification,
    CrossheadTransNextModel,
)
from crosshead.modeling.backbones.transnext import TRANSNEXT_LIMITS
from tiers import first
from transnext_names import (
    ALL_AGGREGATED,
    PUBLISHED_MIXTURES,
    PUBLISHED_SIZES,
    STAGES,
    mixture_of,
    published_tensors,
)
from transnext_toys import CASES, GLOBAL, IMAGES, ROUTED, SIZES, model_of


def random_checkpoint(fields: dict[str, Any], *counts: list[int]) -> dict[str, torch.Tensor]:
    """Return random tensors with the published names and shapes."""
    generator = torch.Generator().manual_seed(2)
    shapes = published_tensors(fields, 3, *counts)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def load_checkpoint(fields: dict[str, Any], tensors: dict[str, torch.Tensor], *counts: list[int]) -> Any:
    """Load a crosshead classifier from published tensors; assert that no name is missing or unexpected."""
    config = CrossheadTransNextConfig(**fields, num_labels=3, mixers=mixture_of(fields, *counts) if counts else {})
    options: dict[str, Any] = {"config": config, "state_dict": dict(tensors), "output_loading_info": True}
    model, report = CrossheadTransNextForImageClassification.from_pretrained(None, **options)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    return model


SMALLER = {"small": [1, 1, 2, 1], "base": [1, 2, 1, 1], "micro": [1, 1, 1, 2], "tiny": [2, 1, 1, 1]}
"""Depths with fewer layers per stage; tensor names only repeat in further layers."""


@pytest.mark.oldest
@pytest.mark.parametrize("name", first([*PUBLISHED_MIXTURES, *PUBLISHED_SIZES, "all aggregated"], 9))
def test_published_tensor_names_load_and_save(name: str, tmp_path: Path) -> None:
    size, *counts = PUBLISHED_MIXTURES.get(name, (name,))
    fields = ALL_AGGREGATED if name == "all aggregated" else PUBLISHED_SIZES[size] | STAGES
    fields = fields | {"depths": SMALLER.get(size, [1, 1, 1, 1])}
    tensors = random_checkpoint(fields, *counts)
    model = load_checkpoint(fields, tensors, *counts)
    block, size_of = model.transnext.block1[0], fields["hidden_sizes"][0]
    assert torch.equal(block.attn.q_proj.weight, tensors["block1.0.attn.q.weight"])
    assert torch.equal(block.attn.v_proj.bias, tensors["block1.0.attn.kv.bias"][size_of:])
    if counts:
        router = model.transnext.block4[0].attn.mixers.mixture
        for ours, theirs in (("routed", "wg"), ("shared", "wg_1"), ("balance", "wg_0")):
            assert torch.equal(getattr(router, ours).weight, tensors[f"block4.0.attn.{theirs}.weight"])
    model.save_pretrained(tmp_path)
    saved = {key.removeprefix("transnext."): value for key, value in load_file(tmp_path / "model.safetensors").items()}
    assert saved.keys() == tensors.keys() and all(torch.equal(saved[key], tensors[key]) for key in tensors)
    again = CrossheadTransNextForImageClassification.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(again[key], value) for key, value in model.state_dict().items())


MILLIONS = {"micro": 12.8, "tiny": 28.2, "small": 49.7, "base": 89.7}
"""Millions of parameters in TransNeXt's table, rounded down. MoH's table 1 has 50 and 90, with and without routers."""


@pytest.mark.parametrize("name", [*PUBLISHED_SIZES, *PUBLISHED_MIXTURES])
def test_parameter_counts_match_papers(name: str) -> None:
    size, *counts = PUBLISHED_MIXTURES.get(name, (name,))
    fields = PUBLISHED_SIZES[size] | STAGES
    config = CrossheadTransNextConfig(**fields, num_labels=1000, mixers=mixture_of(fields, *counts) if counts else {})
    with torch.device("meta"):
        parameters = CrossheadTransNextForImageClassification(config).num_parameters()
    assert parameters == sum(torch.Size(shape).numel() for shape in published_tensors(fields, 1000, *counts).values())
    assert counts or int(parameters / 1e5) / 10 == MILLIONS[size]
    if size in ("small", "base"):
        assert f"{parameters / 1e6:.0f}" == {"small": "50", "base": "90"}[size]
    if counts:
        heads = sum(config.layout_of_layer(layer).query_heads for layer in range(config.num_hidden_layers))
        assert f"{sum(config.mixers['mixture']['active_heads']) / heads:.0%}" == f"{name.split('_')[1]}%"


def test_logits_are_head_applied_to_pooled_output() -> None:
    model = model_of(ROUTED)
    outputs = model.transnext(IMAGES)
    assert outputs.last_hidden_state.shape == (2, 2, 32)  # 29 x 37 pixels are 1 x 2 in the last stage
    assert torch.equal(model.head(outputs.pooler_output), model(IMAGES).logits)


@pytest.mark.oldest
@pytest.mark.parametrize("case", first(["knocking+mixture", "mixture", "talking", "plain"], 2))
@torch.no_grad()
def test_saved_model_loads_by_auto_class_and_remote_code(case: str, warm_process: Any, tmp_path: Path) -> None:
    model, environment = model_of(CASES[case]), os.environ | {"HF_HUB_OFFLINE": "1"}
    model.save_pretrained(tmp_path / "model")
    again = transformers.AutoModelForImageClassification.from_pretrained(
        tmp_path / "model", attn_implementation="eager"
    )
    assert torch.equal(again.eval()(IMAGES).logits, model(IMAGES).logits)
    alone = transformers.AutoModel.from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
    assert type(alone) is CrossheadTransNextModel
    assert torch.equal(alone(IMAGES).pooler_output, model.transnext(IMAGES).pooler_output)
    save_file({"ids": IMAGES}, tmp_path / "inputs.safetensors")
    worker = Path(__file__).with_name("remote_code_worker.py")
    command = [sys.executable, "-P", str(worker), str(tmp_path)]
    done = warm_process.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert torch.equal(load_file(tmp_path / "outputs.safetensors")["logits"], model(IMAGES).logits)


LIMITED: dict[str, dict[str, Any]] = {
    "explicit": {"explicit": {"layers": GLOBAL}},
    "bilinear": {"bilinear": {"layers": GLOBAL}},
    "talking": {"talking": {}},
    "differential": {"differential": {"layers": [3]}},
    "differential.half_values": {"differential": {"layers": GLOBAL, "half_values": True}},
}
"""A configuration that violates each limit."""


@pytest.mark.parametrize("limit", TRANSNEXT_LIMITS, ids=lambda limit: limit.option)
def test_unsupported_mixers_are_refused_with_reason(limit: Any) -> None:
    with pytest.raises(ValueError, match=f"mixers.{limit.option}") as caught:
        CrossheadTransNextConfig(**SIZES, mixers=LIMITED[limit.option])
    assert limit.reason in str(caught.value) and "\n" not in str(caught.value)


def test_every_mechanism_is_tested_or_refused() -> None:
    proven = {name for mixers in CASES.values() for name in mixers}
    limited = {limit.option for limit in TRANSNEXT_LIMITS if limit.everywhere}
    assert proven | limited >= set(MECHANISMS)


@pytest.mark.parametrize(
    ("changes", "quoted"),
    [
        ({"depths": [1, 1, 2]}, "hidden_sizes=.*use 3 whole numbers"),
        ({"sr_ratios": [8, 4, 2, 0]}, "sr_ratios"),
        ({"num_attention_heads": [3, 4, 4, 4]}, "num_attention_heads=3"),
        ({"window_size": 4}, "window_size=4"),
        ({"mixers": {"mixture": {"active_heads": [3, 4, 3, 3, 3]}}}, "mixers.mixture.active_heads=3"),
        ({"mixers": {"mixture": {"active_heads": [2, 3, 3, 3, 3], "shared_heads": [2, 3, 0, 0, 0]}}}, "layer 1"),
    ],
)
def test_invalid_configs_are_refused(changes: dict[str, Any], quoted: str) -> None:
    with pytest.raises(ValueError, match=quoted):
        CrossheadTransNextConfig(**(SIZES | changes))
