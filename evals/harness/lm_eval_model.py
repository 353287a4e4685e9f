"""Runs one loaded model through lm-evaluation-harness, with errors where the harness only logs a warning."""

import logging
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any

from crosshead.common.errors import EvalError, one_line
from crosshead.common.model_location import split_revision

from ..open_model import Opened, check_tokens
from .tasks import LoadedBenchmark, seed

MAXIMUM_BATCH = 64
"""Maximum number of sequences in a batch of automatic size, and in a batch of vLLM."""
TOKENS_ON_CPU = 2048
"""Maximum number of tokens in a batch on a CPU, where a batch that is too large does not fail early."""
RESAMPLES = 1000
"""Number of bootstrap resamples for standard errors without a formula."""


@contextmanager
def quiet() -> Iterator[None]:
    """Hide log messages and standard output; progress bars are shown on a terminal only."""
    with ExitStack() as stack:
        null = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        target = sys.stderr if sys.stderr.isatty() else null
        stack.enter_context(redirect_stdout(target))
        stack.enter_context(redirect_stderr(target))
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.ERROR)
        yield


def hf_model(model: Any, tokenizer: Any, batch_size: int | str) -> Any:
    """Return a transformers model in the harness's model class, with the checks of `Checks`."""
    from lm_eval.models.huggingface import HFLM

    return type("CheckedModel", (Checks, HFLM), {})(
        pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size, max_batch_size=MAXIMUM_BATCH
    )


def vllm_model(opened: Opened, batch_size: int | str) -> Any:
    """Return a vLLM model in the harness's model class, with the checks of `Checks`; vLLM loads the weights itself."""
    try:
        from lm_eval.models.vllm_causallms import VLLM
    except ImportError as error:
        raise EvalError(f"--backend vllm needs vLLM in this environment: pip install vllm ({error})") from error

    name, revision = split_revision(opened.name)
    try:
        return type("CheckedModel", (Checks, VLLM), {})(
            pretrained=name,
            revision=revision,
            tokenizer_revision=revision,
            trust_remote_code=opened.trust_remote_code,
            batch_size=batch_size,
            max_num_seqs=MAXIMUM_BATCH,
            dtype=str(opened.config.dtype or "auto").removeprefix("torch."),  # "auto" makes float32 half precision
        )
    except Exception as error:  # an engine may raise any error
        raise EvalError(f"vLLM cannot run {opened.name}: {one_line(error)}") from error


def run_harness(checked: Any, benchmarks: Sequence[LoadedBenchmark], limit: int | None) -> dict[str, Any]:
    """Return the harness's results of a model, with the scores of every item.

    Two fields are added: `context`, the length of the model's context in tokens, and `truncated`, task -> number of
    items that do not fit into the context, whose beginning the harness removes.
    """
    from lm_eval import evaluate
    from lm_eval.defaults import DEFAULT_OTHER_SEED

    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # resampling would start a process for each core
    seed()
    tasks = {task.task_name: task for benchmark in benchmarks for task in benchmark.members}
    for task in tasks.values():
        task.set_fewshot_seed(DEFAULT_OTHER_SEED)
    try:
        results = evaluate(
            checked,
            {"tasks": tasks, "groups": {group.name: group.task for group in benchmarks if group.is_group}},
            limit=limit,
            bootstrap_iters=RESAMPLES,
            confirm_run_unsafe_code=True,  # load_tasks refuses these tasks unless the user allows them
        )
    except OverflowError as error:
        raise EvalError("a perplexity is too large to be a number: the model's weights are broken") from error
    except EvalError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise EvalError(
            f"lm_eval cannot score {', '.join(tasks)} ({one_line(error)}): correct the task's metrics or data, "
            "or choose other tasks with --tasks; --debug shows where it failed"
        ) from error
    truncated = Counter(task for task, _ in checked.truncated)
    return {**results, "context": checked.max_length, "truncated": truncated}


class Checks:
    """Mixin that checks requests and log-likelihoods, for a subclass of the harness's model class."""

    max_length: int
    max_gen_toks: int
    max_batch_size: int
    device: Any
    _config: Any

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.truncated: set[tuple[str, int]] = set()
        """Task and index of each item that is too long for the context, generated tokens included."""

    def loglikelihood(self, requests: Any, **options: Any) -> Any:
        """Return the log-likelihoods of answers, which must not be empty and must fit into the context."""
        for request in requests:
            context, answer = request.args
            _check_text(request, answer)
            if self._count_tokens(answer) > self.max_length:
                raise EvalError(
                    f"{_item(request)} has an answer longer than the model's context of {self.max_length} tokens: "
                    "it cannot be scored"
                )
            if self._count_tokens(context + answer) > self.max_length + 1:
                self.truncated.add((request.task_name, request.doc_id))
        results: list[tuple[float, bool]] = super().loglikelihood(requests, **options)  # type: ignore[misc]
        _check_finite(requests, [value for value, _ in results])
        return results

    def loglikelihood_rolling(self, requests: Any, **options: Any) -> Any:
        """Return the log-likelihoods of texts; the harness splits a long one into windows."""
        for request in requests:
            _check_text(request, request.args[0])
        results: list[float] = super().loglikelihood_rolling(requests, **options)  # type: ignore[misc]
        _check_finite(requests, results)
        return results

    def generate_until(self, requests: Any, **options: Any) -> Any:
        """Return generated answers, which must leave room for the prompt in the context."""
        from lm_eval.models.utils import normalize_gen_kwargs

        for request in requests:
            prompt, settings = request.args
            new_tokens = normalize_gen_kwargs(settings, self.max_gen_toks)["max_gen_toks"]
            if new_tokens >= self.max_length:
                raise EvalError(
                    f"{request.task_name} generates up to {new_tokens} tokens, but the model's context has "
                    f"{self.max_length}: choose other tasks with --tasks"
                )
            if self._count_tokens(prompt) > self.max_length - new_tokens:
                self.truncated.add((request.task_name, request.doc_id))
        return super().generate_until(requests, **options)  # type: ignore[misc]

    def tok_encode(self, string: str | list[str], **options: Any) -> Any:
        """Return the tokens of one text or of several texts; they must be in the model's vocabulary."""
        tokens: Any = super().tok_encode(string, **options)  # type: ignore[misc]
        for ids in [tokens] if isinstance(string, str) else tokens:
            check_tokens(ids, self._config.get_text_config().vocab_size)
        return tokens

    def _detect_batch_size(self, requests: Any = None, pos: int = 0) -> int:
        """Return the batch size: on a CPU by a limit of tokens; on a GPU, the harness tries sizes until one fits."""
        if self.device.type != "cpu":
            return super()._detect_batch_size(requests, pos)  # type: ignore[misc]
        length = len(requests[pos][1] + requests[pos][2]) if requests else self.max_length
        return max(1, min(self.max_batch_size, TOKENS_ON_CPU // length))

    def _count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text; for a short text, its number of bytes as an upper bound."""
        size = len(text.encode())
        return size if size < self.max_length else len(self.tok_encode(text))


def _check_text(request: Any, text: str) -> None:
    if not text.strip():
        raise EvalError(f"{_item(request)} has an empty text: remove it from the task's data")


def _check_finite(requests: Any, values: Sequence[float]) -> None:
    """Refuse log-likelihoods that are not finite: a broken model must not get an accuracy."""
    for request, value in zip(requests, values, strict=True):
        if not math.isfinite(value):
            raise EvalError(f"{_item(request)} has the log-likelihood {value}: the model's weights are broken")


def _item(request: Any) -> str:
    return f"item {request.doc_id} of {request.task_name}"
