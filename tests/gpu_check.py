"""The checks that need a GPU, in two calls of at most 8 minutes each, and a measurement of a minute.

usage: python tests/gpu_check.py correct OUT.json
       python tests/gpu_check.py speed OUT.json
       python tests/gpu_check.py conversion OUT.json

`correct`: every attention implementation in float32 and bfloat16, training, compiled decoding with a static cache,
conversions with `--device cuda` compared with those on the CPU, and random calls of every registered function, by
Triton where there are kernels, compared with float64; in several processes, as compilation takes most of the time.
`speed`: times, memory and launches (`tests/gpu_speed.py`).
`conversion`: the measurement, how long a model of a billion random parameters takes to convert to 75% of its heads.
Prints a line per check, writes all figures, and exits with 1 if one failed; without a GPU it says so and exits with 0.
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
"""Random calls of each function and dtype for one seed, seeds, and the longest text."""
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
    """The backends that can run a case here, beside eager."""
    if "talking" in case:
        return ["sdpa", "crosshead_talking_triton"]
    found = ["sdpa", "flex_attention", *(["flash_attention_2"] if is_flash_attn_2_available() else [])]
    return [*found, "crosshead_mixture_triton"] if "mixture" in case else found


def logits(backbone: str, case: str, backend: str, dtype: torch.dtype) -> torch.Tensor:
    """Logits of a padded batch's real tokens, in float32 on the CPU."""
    model = mixed_model(backbone, CASES[case], backend=backend, **SIZES).to("cuda", dtype)
    with torch.no_grad():
        found = model(tokens(2, 32).cuda(), attention_mask=PADDED.cuda()).logits
    return found[PADDED.bool().cuda()].float().cpu()


def agree(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> bool:
    """No NaN, and close: every token in float32, most in bfloat16, whose rounding sends some to other heads."""
    errors = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    error = errors.max() < 2e-3 if dtype == torch.float32 else errors.median() < 6e-2
    return bool(found.isfinite().all() and error)


def forwards(backbone: str, case: str) -> Iterator[Check]:
    """Every backend and dtype against eager attention in float32 on the CPU."""
    model = mixed_model(backbone, CASES[case], **SIZES)
    with torch.no_grad():
        wanted = model(tokens(2, 32), attention_mask=PADDED).logits[PADDED.bool()]
    for backend in ("eager", *backends(case)):
        for dtype in (torch.float32, torch.bfloat16):
            if dtype == torch.float32 and backend == "flash_attention_2":
                continue

            def check(backend: str = backend, dtype: torch.dtype = dtype) -> bool:
                return agree(logits(backbone, case, backend, dtype), wanted, dtype)

            yield f"{backend} {str(dtype).removeprefix('torch.')}", check


def trains(backbone: str, case: str) -> bool:
    """A step in bf16 gives every parameter a finite gradient."""
    model = mixed_model(backbone, CASES[case], backend=None, **SIZES).to("cuda", torch.bfloat16).train()
    ids = tokens(2, 32).cuda()
    model(ids, attention_mask=PADDED.cuda(), labels=ids.masked_fill(PADDED.cuda() == 0, -100)).loss.backward()
    return all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def decodes(backbone: str, case: str) -> bool:
    """Compiled decoding with a static cache gives the tokens of plain greedy decoding."""
    model = mixed_model(backbone, CASES[case], backend=None, **SIZES).cuda()
    ids, options = tokens(2, 9).cuda(), {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    static = StaticCache(config=model.config, max_cache_len=32)
    return torch.equal(model.generate(ids, past_key_values=static, **options), model.generate(ids, **options))


def check_model(backbone: str, case: str) -> dict[str, str]:
    """Outcomes by name for one model."""
    checks = [*forwards(backbone, case), ("train", partial(trains, backbone, case))]
    checks.append(("static decoding", partial(decodes, backbone, case)))
    return {f"{backbone} {case} {name}": outcome(check) for name, check in checks}


def converts(backbone: str) -> bool:
    """A conversion that is calibrated on the GPU is as near to its source as the one on the CPU.

    Their tensors are not equal: the fits are so ill-conditioned that rounding changes logits by some percent.
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
    """The outcome for one backbone."""
    return {f"{backbone} conversion": outcome(partial(converts, backbone))}


def check_calls(mechanism: str, dtype: torch.dtype, seed: int) -> dict[str, str]:
    """The outcome of random calls of one function."""
    name = f"random calls {mechanism} {str(dtype).removeprefix('torch.')} {seed}"
    errors: list[float] = []

    def holds() -> bool:
        worst, holds = check(mechanism, dtype, "cuda", LONGEST, CALLS, seed)
        errors.append(worst)
        return holds

    found = outcome(holds)
    torch.cuda.empty_cache()  # for the other processes
    return {name: f"{found}: {errors[0]:.2e}" if errors else found}


def outcome(check: Callable[[], bool]) -> str:
    """ "ok", or what is wrong."""
    try:
        return "ok" if check() else "DIFFERS"
    except Exception as error:
        return f"FAILED {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def correct() -> dict[str, Any]:
    """Run every check of the functions and of the models: outcomes by name."""
    outcomes: dict[str, str] = {}
    processes = min(MOST_PROCESSES, os.cpu_count() or 1)
    with ProcessPoolExecutor(processes, get_context("spawn"), one_thread) as pool:
        seeds = range(SEEDS)
        waiting = [pool.submit(check_calls, name, dtype, i) for i in seeds for name in MAKERS for dtype in TOLERANCES]
        waiting += [pool.submit(check_model, backbone, case) for case in CASES for backbone in BACKBONES]
        waiting += [pool.submit(check_conversion, backbone) for backbone in BACKBONES]
        for done in as_completed(waiting):
            outcomes |= done.result()
            for name, found in done.result().items():
                print(f"{name:64} {found}", flush=True)
    return dict(sorted(outcomes.items()))


def conversion(device: str = "cuda") -> dict[str, float]:
    """Seconds that a conversion of a large model takes, with its calibration, but without verification."""
    with tempfile.TemporaryDirectory() as scratch:
        source = write_stock(Path(scratch, "source"), dtype=torch.bfloat16, **BILLION)
        started = time.perf_counter()
        crosshead.convert(
            source, Path(scratch, "out"), {"mixture": {"active_heads": "75%"}}, verify=False, device=device
        )
        return {"mixture, 75% of the heads": round(time.perf_counter() - started, 1)}


def one_thread() -> None:
    """Prepare a process of several: no threads beside it, products in full float32."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False


def main(what: str, out: Path) -> int:
    """Run one of the three; whether something failed decides the exit status."""
    if not torch.cuda.is_available():
        print("no CUDA device: nothing checked")
        return 0
    torch.backends.cuda.matmul.allow_tf32 = False
    if what == "correct":
        found = correct()
        failed = [name for name, outcome in found.items() if not outcome.startswith("ok")]
    elif what == "conversion":
        found, failed = conversion(), []
    else:
        from gpu_speed import speed

        found, failed = speed()
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    out.write_text(json.dumps({"machine": machine, what: found}, indent=2) + "\n", encoding="utf-8")
    print(*failed, f"{machine['device']}, torch {machine['torch']}: {len(failed)} failed", sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("correct", "speed", "conversion"):
        raise SystemExit(__doc__)
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
