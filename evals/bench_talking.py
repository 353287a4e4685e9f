"""`talking` in blocks beside its plain form and beside attention without it; `differential` beside stock attention.

Time is compared of callables that take turns; memory of processes that run one of them each. Heads are mixed by
random maps, which cost what any others cost.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM

from crosshead.modeling.mixer import AttentionCall, HeadLayout, HeadStates
from crosshead.modeling.modeling_crosshead import CrossheadLlamaForCausalLM
from crosshead.modeling.talking import Talking

HEADS, SIZE = 16, 64
SHAPE: dict[str, Any] = {
    "hidden_size": HEADS * SIZE,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "vocab_size": 8192,
    "max_position_embeddings": 8192,
}
WARM_UP = 128
"""Tokens of the call before the memory is read: libraries that load late are not part of a call."""
Run = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """What is measured, of which mechanism, beside what ("eager": the plain form, "stock": torch's own), how long."""

    what: str
    mechanism: str
    rival: str
    length: int

    @property
    def name(self) -> str:
        """As a row of a table starts."""
        return f"{self.mechanism}, {self.what}, {self.length} tokens, beside {self.rival}"

    def pair(self) -> tuple[Run, Run]:
        """Both sides, ready to be timed."""
        return self.side(ours=True), self.side(ours=False)

    def side(self, ours: bool, length: int | None = None) -> Run:
        """One of the two."""
        return MAKERS[self.what](self.mechanism if ours else self.rival, length or self.length)


CASES = (
    Case("forward", "talking", "eager", 4096),
    Case("forward and backward", "talking", "eager", 4096),
    Case("forward", "talking", "stock", 4096),
    Case("forward and backward", "talking", "stock", 4096),
    Case("training step", "talking", "stock", 2048),
    Case("training step", "differential", "stock", 2048),
)


def forward(name: str, length: int) -> Run:
    """Attention without gradients."""
    attention, inputs = _attention(name), _inputs(length)

    def run() -> object:
        with torch.no_grad():
            return attention(*inputs)

    return run


def forward_and_backward(name: str, length: int) -> Run:
    """Attention and the gradients of its inputs, and of its maps."""
    attention, inputs = _attention(name), [x.requires_grad_() for x in _inputs(length)]
    given = torch.randn(1, length, HEADS, SIZE)
    return lambda: torch.autograd.backward(attention(*inputs), given)


def training_step(name: str, length: int) -> Run:
    """A model's loss, gradients and step."""
    mixers: dict[str, Any] = {} if name == "stock" else {"mixers": {name: {}}}
    config = AutoConfig.for_model(
        "crosshead_llama" if mixers else "llama", **SHAPE, **mixers, attn_implementation="sdpa"
    )
    maker: Any = CrossheadLlamaForCausalLM if mixers else AutoModelForCausalLM.from_config
    model = maker(config).train()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, SHAPE["vocab_size"], (1, length))

    def run() -> object:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        return optimizer.zero_grad()

    return run


MAKERS: dict[str, Callable[[str, int], Run]] = {
    "forward": forward,
    "forward and backward": forward_and_backward,
    "training step": training_step,
}


def memory(case: Case) -> dict[str, float]:
    """Most bytes in memory that each side's run adds to what its own process held before, and their ratio.

    The system counts them. A training step counts whole, with model and optimizer.
    """
    ours, rival = (_in_a_process(partial(_grown, case, ours)) for ours in (True, False))
    return {"ours": ours, "rival": rival, "ratio": ours / rival}


def _in_a_process(measure: Callable[[Connection], None]) -> int:
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(sender,))
    process.start()
    sender.close()
    try:
        return int(receiver.recv())
    except EOFError as error:
        raise RuntimeError("the process whose memory was to be measured ended before it had run") from error
    finally:
        process.join()


def _grown(case: Case, ours: bool, sender: Connection) -> None:
    case.side(ours, WARM_UP)()
    if case.what == "training step":
        before = _status("VmRSS")
        run = case.side(ours)
        run()  # the optimizer's own memory comes with the first step
    else:
        run = case.side(ours)
        before = _status("VmRSS")
    run()
    sender.send(_status("VmHWM") - before)


def _status(name: str) -> int:
    """Bytes that the system counts for this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _inputs(length: int) -> list[torch.Tensor]:
    return [torch.randn(1, HEADS, length, SIZE) for _ in range(3)]


def _attention(name: str) -> Callable[..., torch.Tensor]:
    """From query, key and value to outputs (B, T, H, d)."""
    if name == "stock":
        return lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    layout = HeadLayout(HEADS * SIZE, HEADS, HEADS, SIZE, output_heads=HEADS)
    talking = Talking(layout, {"on": ["logits", "weights"], "dynamic": []})
    for maps in talking.parameters():
        torch.nn.init.normal_(maps, std=HEADS**-0.5)

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril()[None, None]
        call = AttentionCall(_unused, name == "eager", mask if name == "eager" else None, SIZE**-0.5, 0.0)
        return talking.attend(HeadStates(query, key, query, key, value), call)[0]

    return run


def _unused(*_: torch.Tensor) -> Any:
    raise NotImplementedError("talking attention does without the backend")
