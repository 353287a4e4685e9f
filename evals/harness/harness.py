"""One model through lm-evaluation-harness, which does the scoring.

What the harness would only remark on is an error here, or counted. It is handed a loaded model, not a name, so that
pickles are refused and missing tensors noticed.
"""

import logging
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

from crosshead.common.errors import EvalError

from .tasks import Loaded, seed

TALKERS = ("lm_eval", "datasets", "huggingface_hub", "transformers", "accelerate")


@contextmanager
def quiet() -> Iterator[None]:
    """Keep their remarks back: what goes wrong comes as an exception. Progress bars go to a terminal alone."""
    loggers = [logging.getLogger(name) for name in TALKERS]
    levels = [logger.level for logger in loggers]
    with ExitStack() as stack:
        if sys.stderr.isatty():
            stack.enter_context(redirect_stdout(sys.stderr))
        else:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        try:
            for logger in loggers:
                logger.setLevel(logging.CRITICAL)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


LARGEST_BATCH = 64
TOKENS_ON_CPU = 2048
"""In a batch: without a GPU, nothing fails in time when a batch is too large."""
RESAMPLES = 1000
"""For standard errors that have no formula."""


@dataclass(frozen=True)
class Outcome:
    """What the harness found."""

    results: dict[str, Any]
    cut: dict[str, int]
    """Items of each task that were longer than the context, and lost their beginning."""
    context: int
    """Tokens."""


def run_harness(
    model: Any, tokenizer: Any, tasks: Sequence[Loaded], batch_size: int | str, limit: int | None
) -> Outcome:
    """Score a model; every item's scores are in the results."""
    from lm_eval import evaluate
    from lm_eval.defaults import DEFAULT_OTHER_SEED
    from lm_eval.models.huggingface import HFLM

    class Scored(Checks, HFLM):  # type: ignore[misc]
        """The harness's model with our checks."""

    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # resampling would start a process for each core
    scored = Scored(
        pretrained=model,
        tokenizer=tokenizer,
        backend="causal",
        batch_size=batch_size,
        max_batch_size=LARGEST_BATCH,
    )
    seed()
    members = {task.task_name: task for each in tasks for task in each.members}
    for task in members.values():
        task.set_fewshot_seed(DEFAULT_OTHER_SEED)
    try:
        results = evaluate(
            scored,
            {"tasks": members, "groups": {each.task.name: each.task for each in tasks if each.is_group}},
            limit=limit,
            bootstrap_iters=RESAMPLES,
            confirm_run_unsafe_code=True,  # load_tasks has asked
        )
    except OverflowError as error:
        raise EvalError("a perplexity is too large to be a number: the model's weights are broken") from error
    return Outcome(results, scored.cut, scored.max_length)


class Checks:
    """What is looked at before a model runs, as a part of the harness's class for models."""

    max_length: int
    max_gen_toks: int
    max_batch_size: int
    device: Any
    model: Any

    def __init__(self, **options: Any) -> None:
        """Nothing is cut yet."""
        super().__init__(**options)
        self.cut: dict[str, int] = {}

    def loglikelihood(self, requests: Any, **options: Any) -> Any:
        """Chances of a continuation: there must be one, and it must fit."""
        seen: set[tuple[str, int]] = set()
        for request in requests:
            context, continuation = request.args
            _check_text(request, continuation)
            if self._tokens(continuation) > self.max_length:
                raise EvalError(
                    f"{_item(request)} has an answer longer than the model's context of {self.max_length} tokens: "
                    "it cannot be scored"
                )
            if self._tokens(context + continuation) > self.max_length + 1:
                seen.add((request.task_name, request.doc_id))
        self._count(seen)
        found: list[tuple[float, bool]] = super().loglikelihood(requests, **options)  # type: ignore[misc]
        _check_numbers(requests, [chance for chance, _ in found])
        return found

    def loglikelihood_rolling(self, requests: Any, **options: Any) -> Any:
        """Chances of a text, in windows where it is long."""
        for request in requests:
            _check_text(request, request.args[0])
        found: list[float] = super().loglikelihood_rolling(requests, **options)  # type: ignore[misc]
        _check_numbers(requests, found)
        return found

    def generate_until(self, requests: Any, **options: Any) -> Any:
        """Written answers, for which the context must have room."""
        from lm_eval.models.utils import normalize_gen_kwargs

        seen: set[tuple[str, int]] = set()
        for request in requests:
            context, asked = request.args
            written = normalize_gen_kwargs(asked, self.max_gen_toks)["max_gen_toks"]
            room = self.max_length - written
            if room <= 0:
                raise EvalError(
                    f"{request.task_name} lets a model write {written} tokens, but the context of this one has "
                    f"{self.max_length}: choose other tasks with --tasks"
                )
            if self._tokens(context) > room:
                seen.add((request.task_name, request.doc_id))
        self._count(seen)
        return super().generate_until(requests, **options)  # type: ignore[misc]

    def tok_encode(self, string: str, **options: Any) -> list[int]:
        """Tokens that the model knows."""
        tokens: list[int] = super().tok_encode(string, **options)  # type: ignore[misc]
        known = self.model.config.get_text_config().vocab_size
        if max(tokens, default=0) >= known:
            raise EvalError(
                f"the tokenizer gives the token {max(tokens)}, but the model's vocabulary ends at {known - 1}: "
                "they do not belong together"
            )
        return tokens

    def _detect_batch_size(self, requests: Any = None, pos: int = 0) -> int:
        """On a GPU the harness tries sizes until one fits."""
        if self.device.type != "cpu":
            return super()._detect_batch_size(requests, pos)  # type: ignore[misc]
        length = len(requests[pos][1] + requests[pos][2]) if requests else self.max_length
        return max(1, min(self.max_batch_size, TOKENS_ON_CPU // length))

    def _tokens(self, text: str) -> int:
        """How many a text has; where it is short, no more than its bytes."""
        size = len(text.encode())
        return size if size < self.max_length else len(self.tok_encode(text))

    def _count(self, seen: set[tuple[str, int]]) -> None:
        for task, _ in seen:
            self.cut[task] = self.cut.get(task, 0) + 1


def _check_text(request: Any, text: str) -> None:
    if not text.strip():
        raise EvalError(f"{_item(request)} has an empty text: take it out of the task's data")


def _check_numbers(requests: Any, chances: Sequence[float]) -> None:
    """Else a broken model would have an accuracy like any other."""
    for request, chance in zip(requests, chances, strict=True):
        if not math.isfinite(chance):
            raise EvalError(f"{_item(request)} has the log likelihood {chance}: the model's weights are broken")


def _item(request: Any) -> str:
    return f"item {request.doc_id} of {request.task_name}"
