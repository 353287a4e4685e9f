"""Generates with vLLM for the prompts in expected.json of a model folder, and prints the results.

Runs in the environment of vLLM.

usage: python vllm_worker.py MODEL eager|compiled PROCESSES
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
    """Print `RESULT ` and a JSON list with tokens and log-probabilities per prompt, on one line."""
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
    expected = json.loads(Path(model, "expected.json").read_text())
    sampling = SamplingParams(
        temperature=0,
        max_tokens=len(expected[0]["tokens"]),
        logprobs=1,
        prompt_logprobs=1,
        detokenize=False,
        ignore_eos=True,
    )
    results = engine.generate([{"prompt_token_ids": case["prompt"]} for case in expected], sampling)
    print("RESULT " + json.dumps([result_of(result) for result in results]))


def result_of(result: Any) -> dict[str, Any]:
    """The new tokens, and the log-probabilities of all prompt and new tokens except the first."""
    tokens = list(result.outputs[0].token_ids)
    prompt_tokens = result.prompt_token_ids
    prompt = [
        logprobs[token].logprob
        for logprobs, token in zip(result.prompt_logprobs, prompt_tokens, strict=True)
        if logprobs
    ]
    new = [logprobs[token].logprob for logprobs, token in zip(result.outputs[0].logprobs, tokens, strict=True)]
    return {"tokens": tokens, "logprobs": prompt + new}


if __name__ == "__main__":
    main(*sys.argv[1:])
