"""Inference features of transformers: pipelines, text streamers, chat templates and device maps."""

import os
import subprocess
from threading import Thread

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer, pipeline

from case_grids import for_one_case
from linked_environment import linked_environment
from toy_checkpoints import character_tokenizer
from toys import CASES, mixed_model

NEW = 6
"""Number of new tokens."""
PROMPT = "a quick brown fox"
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "how are you"}]
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
ELSEWHERE = """
import sys
from transformers import pipeline
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()
made = pipeline("text-generation", sys.argv[1], trust_remote_code=True, device_map="auto")
assert type(made.model).__module__.startswith("transformers_modules"), type(made.model)
print(made(sys.argv[2], max_new_tokens=6, do_sample=False, return_full_text=False)[0]["generated_text"])
"""


@pytest.fixture
def model_folder(case, tmp_path):
    """The folder of a saved model of one case, with a tokenizer and a chat template."""
    made = tmp_path / "model"
    tokenizer = character_tokenizer()
    tokenizer.pad_token, tokenizer.chat_template = "<unknown>", TEMPLATE
    mixed_model("Llama", CASES[case]).save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


@torch.no_grad()
def greedy_continuation(folder, prompt):
    """The greedy continuation by the model in a folder, with one full forward pass per token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    begun = ids.shape[1]
    for _ in range(NEW):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return tokenizer.decode(ids[0, begun:])


def without_whitespace(text):
    """The text without white space, because decoding functions and versions of transformers set it differently."""
    return "".join(text.split())


@for_one_case
def test_pipeline_text_and_chat_equal_greedy_decoding(model_folder):
    made = pipeline("text-generation", str(model_folder))
    prompts = [PROMPT, "one, two, three and"]  # together, so one of them is padded
    made.tokenizer.padding_side = "left"
    answers = made(prompts, batch_size=2, return_full_text=False, **GREEDY)
    for prompt, (answer,) in zip(prompts, answers, strict=True):
        assert without_whitespace(answer["generated_text"]) == without_whitespace(
            greedy_continuation(model_folder, prompt)
        )
    conversation = "<system> be brief\n<user> how are you\n<assistant> "
    assert made.tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == conversation
    (answer,) = made(CHAT, **GREEDY)
    *before, reply = answer["generated_text"]
    assert before == CHAT and reply["role"] == "assistant"
    assert without_whitespace(reply["content"]) == without_whitespace(greedy_continuation(model_folder, conversation))


@for_one_case
def test_streamed_text_equals_greedy_decoding(model_folder):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    stream = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=300)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    thread = Thread(target=model.generate, kwargs={**inputs, **GREEDY, "streamer": stream})
    thread.start()
    pieces = list(stream)
    thread.join()
    assert without_whitespace("".join(pieces)) == without_whitespace(greedy_continuation(model_folder, PROMPT))
    assert len([piece for piece in pieces if piece]) > 1


@for_one_case
@torch.no_grad()
def test_device_maps_and_disk_offload_give_the_same_logits(model_folder, tmp_path):
    """`auto` places the model on one device; if memory is too small, whole layers are offloaded to disk."""
    plain = AutoModelForCausalLM.from_pretrained(model_folder)
    inputs = AutoTokenizer.from_pretrained(model_folder)(PROMPT, return_tensors="pt").input_ids
    expected = plain(inputs).logits
    for device_map in ("auto", "cpu"):
        model = AutoModelForCausalLM.from_pretrained(model_folder, device_map=device_map)
        torch.testing.assert_close(model(inputs.to(model.device)).logits.cpu(), expected, rtol=1e-4, atol=1e-4)
    layer = sum(parameter.nbytes for parameter in plain.model.layers[0].parameters())
    room = sum(parameter.nbytes for parameter in plain.parameters()) - layer
    options = {"device_map": "auto", "max_memory": {"cpu": room}, "offload_folder": tmp_path}
    model = AutoModelForCausalLM.from_pretrained(model_folder, **options)
    assert {"cpu", "disk"} == set(map(str, model.hf_device_map.values()))
    assert not any(".self_attn" in name for name in model.hf_device_map)
    torch.testing.assert_close(model(inputs).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["knocking+mixture"])
def test_pipeline_works_without_crosshead_installed(model_folder, tmp_path):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    (tmp_path / "script.py").write_text(ELSEWHERE)
    python = linked_environment(tmp_path / "env", ["torch", "transformers", "accelerate"])
    arguments = ["-P", str(tmp_path / "script.py"), str(model_folder), PROMPT]
    done = subprocess.run(
        [str(python), *arguments], env=environment, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert without_whitespace(done.stdout) == without_whitespace(greedy_continuation(model_folder, PROMPT))
