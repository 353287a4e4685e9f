"""Compares the time per decoded token of a stock checkpoint and of the same checkpoint folded to half its KV cache.

usage: PYTHONPATH=tests python -P tests/measure/folded_decode.py FOLDER [--tokens 4096 16384] [--vllm PYTHON]

All are stock models with random weights (8 KV heads of 64 features, folded to 4 component heads in 4, 2 and 1 groups).
They run in the classes of transformers with SDPA, and in vLLM if its Python interpreter is given. Writes the results
to FOLDER/folded_decode.json. Stop other processes before you measure times.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GROUPS = (4, 2, 1)
NEW_TOKENS = 32
ROUNDS = 5


def write_models(folder: Path) -> dict[str, Path]:
    """Write the source and the folded models; return name -> folder, the source first."""
    import crosshead
    from toy_checkpoints import write_stock

    folders = {"source": write_stock(folder / "source", "Llama", **SHAPE)}
    for groups in GROUPS:
        mixed, name = folder / f"mixed{groups}", f"{groups} of {4 // groups * 64} features"
        options = {"key_heads": 4, "value_heads": 4, "groups": groups, "method": "svd"}
        crosshead.convert(folders["source"], mixed, {"explicit": options}, verify=False)
        crosshead.fold(mixed, folder / f"folded{groups}", keep_cache=True, verify=False)
        folders[name] = folder / f"folded{groups}"
    return folders


def transformers_times(folders: dict[str, Path], length: int) -> dict[str, list[float]]:
    """Model -> seconds per token in each round, with `length` random entries in the cache; the models alternate."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    token, prepared = torch.tensor([[3]]), {}
    for name, folder in folders.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        cache = DynamicCache(config=model.config)
        shape = (1, model.config.num_key_value_heads, length, model.config.head_dim)
        for layer in range(model.config.num_hidden_layers):
            cache.update(torch.randn(shape), torch.randn(shape), layer)
        prepared[name] = (model, cache)
    times: dict[str, list[float]] = {name: [] for name in folders}
    with torch.inference_mode():
        for _ in range(ROUNDS + 1):
            for name, (model, cache) in prepared.items():
                started = time.perf_counter()
                for _ in range(NEW_TOKENS // 4):
                    model(token, past_key_values=cache)
                times[name].append((time.perf_counter() - started) / (NEW_TOKENS // 4))
                cache.crop(-(NEW_TOKENS // 4))
    return {name: seconds[1:] for name, seconds in times.items()}


def vllm_times(python: str, folder: Path, length: int) -> list[float]:
    """Seconds per token of one model in each round in vLLM, which keeps the prompt's KV cache between rounds."""
    settings = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    settings |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | settings
    command = [python, "-P", __file__, "worker", str(folder), str(length)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    times: list[float] = json.loads(done.stdout.splitlines()[-1])
    return times


def vllm_worker(folder: str, length: int) -> None:
    """Print the seconds per new token: the difference of the times for many tokens and for one, divided."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=folder,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=length + 2 * NEW_TOKENS,
        max_num_seqs=1,
        enable_prefix_caching=True,
    )
    prompt = {"prompt_token_ids": [3 + 7 * i % 500 for i in range(length)]}

    def seconds(tokens: int) -> float:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        engine.generate([prompt], sampling, use_tqdm=False)
        return time.perf_counter() - started

    seconds(2)
    times = [(seconds(NEW_TOKENS + 1) - seconds(1)) / NEW_TOKENS for _ in range(ROUNDS)]
    print(json.dumps(times))


def compared(times: dict[str, list[float]]) -> dict[str, Any]:
    """The median time of each model, and its ratio to the median of the source."""
    source = median(times["source"])
    return {name: {"seconds": median(seconds), "ratio": median(seconds) / source} for name, seconds in times.items()}


def main() -> None:
    """Write the models, measure, and write and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--vllm", help="Python interpreter of an environment with vLLM")
    arguments = parser.parse_args()
    from crosshead.evals.bench.machine import machine

    arguments.folder.mkdir(parents=True)
    folders = write_models(arguments.folder)
    result: dict[str, Any] = {"shape": SHAPE, "machine": machine(), "transformers": {}, "vllm": {}}
    for length in arguments.tokens:
        result["transformers"][length] = compared(transformers_times(folders, length))
        if arguments.vllm:
            times = {name: vllm_times(arguments.vllm, folder, length) for name, folder in folders.items()}
            result["vllm"][length] = compared(times)
        text = json.dumps(result, indent=2)
        (arguments.folder / "folded_decode.json").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        vllm_worker(sys.argv[2], int(sys.argv[3]))
    else:
        main()
