"""SFTTrainer of TRL: chats, packing, gradient accumulation, adapters, and the balance loss, which it omits."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch.nn import functional
from transformers import AutoModelForCausalLM, Trainer
from transformers.utils.logging import disable_progress_bar, enable_progress_bar

from case_grids import for_one_case
from tiers import first
from toy_checkpoints import character_tokenizer
from toys import CASES, mixed_model, tokens

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install -c constraints.txt trl")
datasets = pytest.importorskip("datasets")

TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
ROWS = 8
BALANCE_WEIGHT = 8.0  # as large as the cross-entropy, so that its omission is noticed


class BalancedTrainer(trl.SFTTrainer):
    """Trains with the loss of the model, like Trainer of transformers; the loss of SFTTrainer has no balance loss."""

    compute_loss = Trainer.compute_loss


@pytest.fixture(autouse=True)
def _without_progress_bars():
    """Disable progress bars."""
    datasets.disable_progress_bars()
    disable_progress_bar()
    yield
    datasets.enable_progress_bars()
    enable_progress_bar()


def chat_dataset():
    """Conversations of different lengths; two or more fit into a sequence of 128 tokens."""
    texts = [f"what is {index} {'and ' * (index % 3)}{index + 1}" for index in range(ROWS)]
    messages = [[{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}] for text in texts]
    return datasets.Dataset.from_list([{"messages": conversation} for conversation in messages])


def trainer_for(model: Any, folder: Any, kind: Any = trl.SFTTrainer, peft_config: Any = None, **options: Any) -> Any:
    """An SFTTrainer on the CPU with the usual arguments of its users."""
    tokenizer = character_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = "<unknown>"
    tokenizer.chat_template = TEMPLATE
    small = {"max_steps": 3, "logging_steps": 1, "per_device_train_batch_size": ROWS, "max_length": 128}
    small |= {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    small |= {"learning_rate": 1e-2, "lr_scheduler_type": "constant"}
    arguments = trl.SFTConfig(output_dir=str(folder), **(small | options))
    common = {"train_dataset": chat_dataset(), "processing_class": tokenizer, "peft_config": peft_config}
    return kind(model=model, args=arguments, **common)


def train_losses(trainer: Any) -> list[float]:
    """Train, and return the loss of every step."""
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@torch.no_grad()
def reference_cross_entropy(model: Any, rows: Any) -> float:
    """The mean cross-entropy per predicted token of all conversations, computed one by one."""
    total, predicted = 0.0, 0
    for row in rows:
        ids = torch.tensor(row["input_ids"])
        logits = model(ids[None], use_cache=False).logits[0, :-1]
        total += functional.cross_entropy(logits, ids[1:], reduction="sum").item()
        predicted += len(ids) - 1
    return total / predicted


@for_one_case
def test_sft_lowers_loss_with_and_without_packing(case, tmp_path, capfd):
    losses_by_packing = {}
    for packing in (False, True):
        model = mixed_model("Llama", CASES[case]).train()
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        trainer = trainer_for(model, tmp_path, packing=packing)
        assert len(trainer.train_dataset) == ROWS if not packing else len(trainer.train_dataset) <= ROWS // 2
        if not packing:
            expected = reference_cross_entropy(model, trainer.train_dataset)
        losses_by_packing[packing] = train_losses(trainer)
        for name, parameter in model.named_parameters():
            assert not torch.equal(parameter, before[name]), name
    for steps in losses_by_packing.values():
        assert steps[0] == pytest.approx(expected, rel=1e-5)
        assert steps[0] > steps[1] > steps[2]
    trainer.save_model(tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    assert torch.equal(again(tokens()).logits, model.eval()(tokens()).logits)


@pytest.mark.parametrize("backbone", first(("Llama", "Qwen3Moe")))
@pytest.mark.parametrize("options", first([{"per_device_train_batch_size": 2}, {"packing": True}, {}]), ids=str)
def test_balance_loss_is_included_only_with_the_model_loss(backbone, options, tmp_path, capfd):
    options = options | {"gradient_accumulation_steps": ROWS // options.get("per_device_train_batch_size", ROWS)}
    first_losses = {}
    for weight in (0.0, BALANCE_WEIGHT):
        for kind in (trl.SFTTrainer, BalancedTrainer):
            mixers = {"mixture": CASES["mixture"]["mixture"] | {"balance_weight": weight}}
            model = mixed_model(backbone, mixers).train()
            first_losses[weight, kind], *_ = train_losses(trainer_for(model, tmp_path, kind, max_steps=1, **options))
    own = first_losses[0.0, trl.SFTTrainer]
    assert first_losses[0.0, BalancedTrainer] == pytest.approx(own, rel=1e-5)  # the experts' balance loss is in both
    assert first_losses[BALANCE_WEIGHT, trl.SFTTrainer] == pytest.approx(own, rel=1e-5)  # SFTTrainer ignores it
    # Of four heads, two are shared and one of the other two is active: with equal routing, both have P_i = f_i = 1/2.
    assert 0.5 * BALANCE_WEIGHT - 0.1 < first_losses[BALANCE_WEIGHT, BalancedTrainer] - own < 0.6 * BALANCE_WEIGHT


@for_one_case
def test_sft_adapter_trains_saves_loads_and_merges(case, tmp_path, capfd):
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=list(CASES[case]))
    trainer = trainer_for(mixed_model("Llama", CASES[case]), tmp_path, peft_config=lora)
    trained = train_losses(trainer)
    assert trained[0] > trained[-1]
    trainer.save_model(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(mixed_model("Llama", CASES[case]), tmp_path / "adapter").eval()
    expected = trainer.model.eval()(tokens()).logits
    torch.testing.assert_close(loaded(tokens()).logits, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loaded.merge_and_unload()(tokens()).logits, expected, rtol=1e-4, atol=1e-4)
    assert (mixed_model("Llama", CASES[case])(tokens()).logits - expected).abs().max() > 0.01
