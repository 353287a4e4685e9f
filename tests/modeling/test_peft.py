"""peft: LoRA on the projections plus fully trained mechanisms, or LoRA on every linear layer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from tiers import grid
from toys import CASES, mixed_model, tokens

for_every_case = pytest.mark.parametrize("case", CASES)


def lora_config(case: str, everywhere: bool = False) -> LoraConfig:
    """Return a LoRA config: on q and v projections with fully trained mechanisms, or on all linear layers."""
    if everywhere:
        return LoraConfig(r=2, target_modules="all-linear")
    return LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=list(CASES[case]))


def new_adapter(case: str, everywhere: bool = False) -> Any:
    """Return a toy model with a new adapter."""
    torch.manual_seed(0)
    return get_peft_model(mixed_model("Llama", CASES[case]), lora_config(case, everywhere))


def trained_adapter(case: str, everywhere: bool = False) -> Any:
    """Return an adapter after three large training steps; assert that every trainable parameter has changed."""
    model = new_adapter(case, everywhere).train()
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(trainable.values(), lr=0.02)
    for step in range(3):
        model(tokens(seed=step), labels=tokens(seed=step)).loss.backward()
        for name, parameter in trainable.items():
            assert parameter.grad is not None, name
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad, name
    return model.eval()


def assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that logits are equal up to rounding: kernels may depend on the memory alignment of tensors."""
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-5)


def original_name(name: str) -> str:
    """Return the name of an adapted model's parameter in the model without an adapter."""
    return name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")


@for_every_case
def test_new_adapter_keeps_loss_and_mechanism_gradients(case: str) -> None:
    # In float64: without an adapter, a linear map is multiplied into its projection, which rounds differently.
    plain, model = mixed_model("Llama", CASES[case]).double().train(), new_adapter(case).double().train()
    expected = plain(tokens(), labels=tokens()).loss
    expected.backward()
    loss = model(tokens(), labels=tokens()).loss
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    fully_trained = {name: x for name, x in model.named_parameters() if x.requires_grad and "lora" not in name}
    mixers = {name: parameter for name, parameter in plain.named_parameters() if ".mixers." in name}
    assert {original_name(name) for name in fully_trained} == set(mixers)
    for name, parameter in fully_trained.items():
        torch.testing.assert_close(parameter.grad, mixers[original_name(name)].grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("case", "everywhere"), grid(CASES, (False, True), strength=1))
def test_trained_adapter_survives_save_load_and_merge(case: str, everywhere: bool, tmp_path: Path) -> None:
    model = trained_adapter(case, everywhere)
    expected = model(tokens()).logits.detach()
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(mixed_model("Llama", CASES[case]), tmp_path / "adapter").eval()
    torch.testing.assert_close(dict(loaded.named_parameters()), dict(model.named_parameters()), rtol=0, atol=0)
    assert_close(loaded(tokens()).logits, expected)
    plain = mixed_model("Llama", CASES[case])
    with loaded.disable_adapter():
        assert_close(loaded(tokens()).logits, plain(tokens()).logits)
    merged = loaded.merge_and_unload()
    assert set(merged.state_dict()) == set(plain.state_dict())
    assert_close(merged(tokens()).logits, expected)
    merged.save_pretrained(tmp_path / "merged")
    again = type(plain).from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    assert_close(again(tokens()).logits, merged(tokens()).logits)
