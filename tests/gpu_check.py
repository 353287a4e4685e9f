"""The checks that need a GPU, in two calls of at most 8 minutes each.

usage: python tests/gpu_check.py correct OUT.json
       python tests/gpu_check.py speed OUT.json

`correct`: every attention implementation in float32 and bfloat16, training, compiled decoding with a static cache, and
random calls of every registered function, by Triton where there are kernels, compared with float64. `speed`: times,
memory and launches (`tests/gpu_speed.py`). Prints a line per check, writes all figures, and exits with 1 if one
failed; without a GPU it says so and exits with 0.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import StaticCache
from transformers.utils import is_flash_attn_2_available

from random_calls import checks
from toys import BACKBONES, CASES, mixed_model, tokens

CALLS, LONGEST = 200, 700
"""Random calls of each function and dtype, and their longest text."""
SIZES = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128}
PADDED = torch.tensor([[1] * 32, [0] * 12 + [1] * 20])


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


def forwards(backbone: str, case: str) -> Iterator[tuple[str, Callable[[], bool]]]:
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


def correct() -> dict[str, Any]:
    """Run every check of a model and of the functions: outcomes by name."""
    outcomes: dict[str, str] = {}
    for backbone in BACKBONES:
        for case in CASES:
            found = [*forwards(backbone, case), ("train", lambda b=backbone, c=case: trains(b, c))]
            found.append(("static decoding", lambda b=backbone, c=case: decodes(b, c)))
            for name, check in found:
                try:
                    outcome = "ok" if check() else "DIFFERS"
                except Exception as error:
                    outcome = f"FAILED {type(error).__name__}: {str(error).splitlines()[0]}"
                outcomes[f"{backbone} {case} {name}"] = outcome
                print(f"{backbone:9} {case:32} {name:28} {outcome}", flush=True)
    for name, worst, holds in checks("cuda", LONGEST, CALLS):
        outcomes[f"random calls: {name}"] = f"{'ok' if holds else 'DIFFERS'}: {worst:.2e}"
        print(f"random calls: {name:28} {worst:.2e} {'ok' if holds else 'DIFFERS'}", flush=True)
    return outcomes


def main(what: str, out: Path) -> int:
    """Run one of the two; whether something failed decides the exit status."""
    if not torch.cuda.is_available():
        print("no CUDA device: nothing checked")
        return 0
    torch.backends.cuda.matmul.allow_tf32 = False
    if what == "correct":
        found = correct()
        failed = sum(not outcome.startswith("ok") for outcome in found.values())
    else:
        from gpu_speed import speed

        found, failed = speed(), 0
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    out.write_text(json.dumps({"machine": machine, what: found}, indent=2) + "\n", encoding="utf-8")
    print(f"{machine['device']}, torch {machine['torch']}: {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("correct", "speed"):
        raise SystemExit(__doc__)
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
