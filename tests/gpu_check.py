"""The checks that need a GPU: two commands of at most 8 minutes each, and a measurement of one minute.

usage: python tests/gpu_check.py correct OUT.json
       python tests/gpu_check.py speed OUT.json
       python tests/gpu_check.py conversion OUT.json

`correct`: every attention implementation in float32 and bfloat16, training, compiled decoding with a static cache,
conversions with `--device cuda` compared with the CPU, and random calls of every registered attention function (its
Triton kernel if it has one) compared with float64. Runs in several processes, as compilation takes most of the time.
`speed`: times, memory and launches (`tests/gpu_speed.py`).
`conversion`: seconds to convert a model of a billion random parameters to 75% of its heads.
Prints a line per check, writes all figures, and exits with 1 if one failed; without a GPU it exits with 0.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from transformers import StaticCache
from transformers.utils import is_flash_attn_2_available

import crosshead
from crosshead.conversion.calibration.text import default_text
from random_calls import MAKERS, TOLERANCES, check
from toy_checkpoints import write_stock
from toys import BACKBONES, CASES, mixed_model, tokens

CALLS, SEEDS, LONGEST = 8, 6, 700
"""Random calls per function, dtype and seed; number of seeds; maximum sequence length."""
MOST_PROCESSES = 14
SIZES = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128}
BILLION = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
"""A Llama of 1.07 billion parameters."""
PADDED = torch.tensor([[1] * 32, [0] * 12 + [1] * 20])
Check = tuple[str, Callable[[], bool]]


def backends(case: str) -> list[str]:
    """Return the attention backends that support a case, besides eager."""
    if "talking" in case:
        return ["sdpa", "crosshead_talking_triton"]
    names = ["sdpa", "flex_attention", *(["flash_attention_2"] if is_flash_attn_2_available() else [])]
    return [*names, "crosshead_mixture_triton"] if "mixture" in case else names


def logits(backbone: str, case: str, backend: str, dtype: torch.dtype) -> torch.Tensor:
    """Return the logits of a padded batch's real tokens, computed on the GPU, in float32 on the CPU."""
    model = mixed_model(backbone, CASES[case], backend=backend, **SIZES).to("cuda", dtype)
    with torch.no_grad():
        output = model(tokens(2, 32).cuda(), attention_mask=PADDED.cuda()).logits
    return output[PADDED.bool().cuda()].float().cpu()


def agree(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether logits are finite and close: all tokens in float32; the median in bfloat16, where routes may differ."""
    errors = (result - expected).norm(dim=-1) / expected.norm(dim=-1)
    error = errors.max() < 2e-3 if dtype == torch.float32 else errors.median() < 6e-2
    return bool(result.isfinite().all() and error)


def forwards(backbone: str, case: str) -> Iterator[Check]:
    """Yield checks of every backend and dtype against eager attention in float32 on the CPU."""
    model = mixed_model(backbone, CASES[case], **SIZES)
    with torch.no_grad():
        expected = model(tokens(2, 32), attention_mask=PADDED).logits[PADDED.bool()]
    for backend in ("eager", *backends(case)):
        for dtype in (torch.float32, torch.bfloat16):
            if dtype == torch.float32 and backend == "flash_attention_2":
                continue

            def check(backend: str = backend, dtype: torch.dtype = dtype) -> bool:
                return agree(logits(backbone, case, backend, dtype), expected, dtype)

            yield f"{backend} {str(dtype).removeprefix('torch.')}", check


def trains(backbone: str, case: str) -> bool:
    """Whether a training step in bfloat16 gives every parameter a finite gradient."""
    model = mixed_model(backbone, CASES[case], backend=None, **SIZES).to("cuda", torch.bfloat16).train()
    ids = tokens(2, 32).cuda()
    model(ids, attention_mask=PADDED.cuda(), labels=ids.masked_fill(PADDED.cuda() == 0, -100)).loss.backward()
    return all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def decodes(backbone: str, case: str) -> bool:
    """Whether compiled decoding with a static cache gives the tokens of plain greedy decoding."""
    model = mixed_model(backbone, CASES[case], backend=None, **SIZES).cuda()
    ids, options = tokens(2, 9).cuda(), {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    static = StaticCache(config=model.config, max_cache_len=32)
    return torch.equal(model.generate(ids, past_key_values=static, **options), model.generate(ids, **options))


def check_model(backbone: str, case: str) -> dict[str, str]:
    """Run all checks of one model; return outcomes by name."""
    checks = [*forwards(backbone, case), ("train", partial(trains, backbone, case))]
    checks.append(("static decoding", partial(decodes, backbone, case)))
    return {f"{backbone} {case} {name}": outcome(check) for name, check in checks}


def converts(backbone: str) -> bool:
    """Whether a conversion calibrated on the GPU is as close to its source as one on the CPU.

    Compares KL divergences, not tensors: the fits are so ill-conditioned that rounding changes logits by some percent.
    """
    mixers = {"explicit": {"key_heads": 3, "value_heads": 2}, "mixture": {"active_heads": 6}}
    divergences = []
    with tempfile.TemporaryDirectory() as scratch:
        source = write_stock(Path(scratch, "source"), backbone, num_attention_heads=8, num_key_value_heads=4)
        text = Path(scratch, "text.txt")
        text.write_text(default_text()[:100_000], encoding="utf-8")
        for device in ("cpu", "cuda"):
            options = {"calibration": text, "dtype": "float32", "device": device}
            report = crosshead.convert(source, Path(scratch, device), mixers, **options)
            divergences.append(report["verification"]["kl_divergence"])
    on_cpu, on_gpu = divergences
    print(f"{backbone} conversion: KL divergence {on_gpu:.5f}, on the CPU {on_cpu:.5f}", flush=True)
    return abs(on_gpu - on_cpu) < 0.1 * on_cpu


def check_conversion(backbone: str) -> dict[str, str]:
    """Run the conversion check of one backbone; return its outcome by name."""
    return {f"{backbone} conversion": outcome(partial(converts, backbone))}


def check_calls(mechanism: str, dtype: torch.dtype, seed: int) -> dict[str, str]:
    """Check random calls of one attention function; return the outcome by name."""
    name = f"random calls {mechanism} {str(dtype).removeprefix('torch.')} {seed}"
    errors: list[float] = []

    def holds() -> bool:
        worst, holds = check(mechanism, dtype, "cuda", LONGEST, CALLS, seed)
        errors.append(worst)
        return holds

    result = outcome(holds)
    torch.cuda.empty_cache()  # for the other processes
    return {name: f"{result}: {errors[0]:.2e}" if errors else result}


def outcome(check: Callable[[], bool]) -> str:
    """Run a check; return "ok", "DIFFERS" or the error."""
    try:
        return "ok" if check() else "DIFFERS"
    except Exception as error:
        return f"FAILED {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def correct() -> dict[str, Any]:
    """Run every check of `correct` in a process pool; return outcomes by name."""
    outcomes: dict[str, str] = {}
    processes = min(MOST_PROCESSES, os.cpu_count() or 1)
    with ProcessPoolExecutor(processes, get_context("spawn"), one_thread) as pool:
        seeds = range(SEEDS)
        waiting = [pool.submit(check_calls, name, dtype, i) for i in seeds for name in MAKERS for dtype in TOLERANCES]
        waiting += [pool.submit(check_model, backbone, case) for case in CASES for backbone in BACKBONES]
        waiting += [pool.submit(check_conversion, backbone) for backbone in BACKBONES]
        for done in as_completed(waiting):
            outcomes |= done.result()
            for name, result in done.result().items():
                print(f"{name:64} {result}", flush=True)
    return dict(sorted(outcomes.items()))


def conversion(device: str = "cuda") -> dict[str, float]:
    """Return the seconds that a conversion of a large model takes, with calibration, without verification."""
    with tempfile.TemporaryDirectory() as scratch:
        source = write_stock(Path(scratch, "source"), dtype=torch.bfloat16, **BILLION)
        started = time.perf_counter()
        crosshead.convert(
            source, Path(scratch, "out"), {"mixture": {"active_heads": "75%"}}, verify=False, device=device
        )
        return {"mixture, 75% of the heads": round(time.perf_counter() - started, 1)}


def one_thread() -> None:
    """Initialise a worker process: one thread, matmuls in full float32."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False


def main(what: str, out: Path) -> int:
    """Run one of the three commands and write its figures; return 1 if a check failed, else 0."""
    if not torch.cuda.is_available():
        print("no CUDA device: nothing checked")
        return 0
    torch.backends.cuda.matmul.allow_tf32 = False
    if what == "correct":
        figures = correct()
        failed = [name for name, outcome in figures.items() if not outcome.startswith("ok")]
    elif what == "conversion":
        figures, failed = conversion(), []
    else:
        from gpu_speed import speed

        figures, failed = speed()
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    out.write_text(json.dumps({"machine": machine, what: figures}, indent=2) + "\n", encoding="utf-8")
    print(*failed, f"{machine['device']}, torch {machine['torch']}: {len(failed)} failed", sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("correct", "speed", "conversion"):
        raise SystemExit(__doc__)
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
