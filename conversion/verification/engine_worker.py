"""Runs a model in a serving engine: a script that `engines.py` starts in the engine's own Python environment.

usage: python -P engine_worker.py JOB.json

It imports the engine and nothing from crosshead. The results go to the file that the job names; an error is the last
line on stderr.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

MISSING = 3
"""Exit status if the engine is not installed."""


def run_vllm(job: dict[str, Any]) -> dict[str, Any]:
    """Return log-probabilities, greedy tokens, cache size and speed of a model folder in vLLM."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # so that the cache of the engine can be read here
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    # On a CPU with AMX, vLLM's usual function for DeepSeek's latent attention takes half precision only.
    is_latent = "kv_lora_rank" in json.loads(Path(job["model"], "config.json").read_text(encoding="utf-8"))
    options = {"attention_config": {"backend": "CPU_MLA"}} if is_latent and current_platform.is_cpu() else {}
    prompts = [{"prompt_token_ids": tokens} for tokens in job["prompts"]]
    engine = LLM(
        model=job["model"],
        trust_remote_code=job["remote_code"],
        dtype=job["dtype"],
        skip_tokenizer_init=True,
        max_model_len=max(map(len, job["prompts"])) + job["new_tokens"],
        max_num_seqs=len(prompts),
        enforce_eager=True,
        enable_prefix_caching=False,
        **(options if job["dtype"] == "float32" else {}),
    )
    greedy = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    scored = engine.generate(prompts, SamplingParams(max_tokens=2, prompt_logprobs=0, **greedy))  # warms up, too
    started = time.perf_counter()
    generated = engine.generate(prompts, SamplingParams(max_tokens=job["new_tokens"], **greedy))
    seconds = time.perf_counter() - started
    cache = engine.llm_engine.vllm_config.cache_config
    specs = engine.collective_rpc("get_kv_cache_spec")[0].values()
    return {
        "version": vllm.__version__,
        "logprobs": [
            [logprobs[token].logprob for token, logprobs in zip(tokens[1:], result.prompt_logprobs[1:], strict=True)]
            for tokens, result in zip(job["prompts"], scored, strict=True)
        ],
        "tokens": [list(result.outputs[0].token_ids) for result in generated],
        "tokens_per_second": len(prompts) * job["new_tokens"] / seconds,
        "kv_bytes_per_token": sum(spec.page_size_bytes / spec.block_size for spec in specs),
        "kv_cache_tokens": cache.num_gpu_blocks * cache.block_size,
    }


def run_llama_cpp(job: dict[str, Any]) -> dict[str, Any]:
    """Return log-probabilities, greedy tokens and speed of a GGUF file in llama.cpp.

    `engines.py` reads the size of the cache from the log.
    """
    import llama_cpp
    import numpy

    length = max(map(len, job["prompts"])) + job["new_tokens"]
    kv_type = llama_cpp.GGML_TYPE_F32 if job["dtype"] == "float32" else llama_cpp.GGML_TYPE_F16
    model = llama_cpp.Llama(job["model"], n_ctx=length, logits_all=True, type_k=kv_type, type_v=kv_type, verbose=True)

    def last_logprobs(count: int) -> Any:
        logits = numpy.array(model.scores[model.n_tokens - count : model.n_tokens], dtype=numpy.float64)
        shifted = logits - logits.max(-1, keepdims=True)
        return shifted - numpy.log(numpy.exp(shifted).sum(-1, keepdims=True))

    logprobs, continuations, seconds = [], [], 0.0
    for prompt in job["prompts"]:
        model.reset()
        model.eval(prompt)
        prompt_logprobs = last_logprobs(len(prompt))
        logprobs.append([float(prompt_logprobs[i, token]) for i, token in enumerate(prompt[1:])])
        tokens = [int(prompt_logprobs[-1].argmax())]
        started = time.perf_counter()
        while len(tokens) < job["new_tokens"]:
            model.eval(tokens[-1:])
            tokens.append(int(last_logprobs(1)[0].argmax()))
        seconds += time.perf_counter() - started
        continuations.append(tokens)
    return {
        "version": llama_cpp.__version__,
        "logprobs": logprobs,
        "tokens": continuations,
        "tokens_per_second": len(continuations) * (job["new_tokens"] - 1) / seconds,
        "kv_cache_tokens": model.n_ctx(),
    }


RUN = {"vllm": run_vllm, "llama.cpp": run_llama_cpp}


if __name__ == "__main__":
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        Path(request["result"]).write_text(json.dumps(RUN[request["engine"]](request)), encoding="utf-8")
    except ModuleNotFoundError as error:
        raise SystemExit(MISSING if error.name in ("vllm", "llama_cpp") else str(error)) from error
    except Exception as error:  # an engine may raise any error; it is printed as one line
        raise SystemExit(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
