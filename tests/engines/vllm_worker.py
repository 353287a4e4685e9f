"""Runs in vLLM's environment: generates for the prompts of a folder's expected.json, and prints what vLLM gives.

python vllm_worker.py MODEL eager|compiled PROCESSES
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    GLOO_SOCKET_IFNAME="lo",
)
if sys.argv[3:] == ["1"]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def main(model: str, mode: str, processes: str) -> None:
    """One line of JSON: tokens and log-probabilities of each prompt."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model,
        model_impl="transformers",
        trust_remote_code=True,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=4,
        enforce_eager=mode == "eager",
        tensor_parallel_size=int(processes),
        enable_prefix_caching=False,
    )
    wanted = json.loads(Path(model, "expected.json").read_text())
    sampling = SamplingParams(
        temperature=0,
        max_tokens=len(wanted[0]["tokens"]),
        logprobs=1,
        prompt_logprobs=1,
        detokenize=False,
        ignore_eos=True,
    )
    results = engine.generate([{"prompt_token_ids": each["prompt"]} for each in wanted], sampling)
    print("RESULT " + json.dumps([found(result) for result in results]))


def found(result: Any) -> dict[str, Any]:
    """The tokens, and the log-probability of each token of the prompt but the first, and of each new one."""
    tokens = list(result.outputs[0].token_ids)
    prompt_tokens = result.prompt_token_ids
    prompt = [each[token].logprob for each, token in zip(result.prompt_logprobs, prompt_tokens, strict=True) if each]
    new = [each[token].logprob for each, token in zip(result.outputs[0].logprobs, tokens, strict=True)]
    return {"tokens": tokens, "logprobs": prompt + new}


if __name__ == "__main__":
    main(*sys.argv[1:])
