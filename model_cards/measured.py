"""Writes the section of a card with the measured results."""

from collections.abc import Iterator

from .facts import Facts, Json
from .tables import NOT_MEASURED, change, figure, metric_name, table

NOTHING = {
    "conversion": f"Comparison with the source: {NOT_MEASURED}.",
    "training": f"Training: {NOT_MEASURED}.",
    "scores": f"Benchmarks: {NOT_MEASURED}.",
}
"""Part of the section -> its text if there are no results."""
CACHE = "KV cache, bytes per token in the stored dtype"
ROWS = {
    "loss": ("loss_before", "loss_after"),
    "perplexity": ("perplexity_before", "perplexity_after"),
    CACHE: ("kv_bytes_per_token_before", "kv_bytes_per_token_after"),
}
"""Row title -> keys of the verification, measured on the source and on the model."""
SINGLE = {
    "KL divergence from the source, nats": "kl_divergence",
    "maximum difference of a logit": "greatest_logit_difference",
    "positions with the same most likely token": "greedy_agreement",
    "maximum difference of a hidden state": "greatest_hidden_difference",
    "images with the same most likely class": "class_agreement",
    "cosine of a token's hidden states": "token_cosine",
    "cosine of the mean hidden states of an input": "embedding_cosine",
}
"""Row title -> key of the verification. Decoders and image classifiers have logits, encoders hidden states."""
CURVE = {
    "loss": "loss of the training objective, last logged",
    "train_loss": "loss of the training objective, mean of the run",
    "eval_loss": "loss on held-out data",
}
"""Metric of a training run -> row title."""


def results(facts: Facts) -> Iterator[str]:
    """The paragraphs and tables of the section."""
    yield "## Measured results"
    yield from _conversion(facts)
    yield from _training(facts)
    if not facts.evaluations:
        yield NOTHING["scores"]
    for evaluation in facts.evaluations:
        yield from _scores(evaluation, facts.name)


def _conversion(facts: Facts) -> Iterator[str]:
    """The comparison with the source; empty for a model that was trained from scratch."""
    if not facts.conversion and not facts.plan.get("convert"):
        return
    verification = facts.conversion.get("verification")
    if not verification:
        yield NOTHING["conversion"]
        return
    when = ", after the conversion and before training" if facts.training and not facts.verified else ""
    text = verification["sample"]["text"].split(",")[0]
    inputs = "{images} images" if "images" in verification else "{windows} windows of {window_length} tokens"
    yield f"Comparison with the source{when}, on {inputs.format_map(verification)} ({text}):"
    is_t5 = facts.config.get("is_encoder_decoder")
    titles = {CACHE: f"{CACHE}, for a token of the input and one of the output"} if is_t5 else {}
    rows = [
        (titles.get(name, name), *(_shown(verification[key]) for key in pair))
        for name, pair in ROWS.items()
        if verification.get(pair[0])
    ]
    rows += [(name, "", _shown(verification[key])) for name, key in SINGLE.items() if key in verification]
    yield table(["", "source", "this model"], rows)


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else figure(value)


def _training(facts: Facts) -> Iterator[str]:
    metrics = facts.training.get("metrics")
    if not metrics:
        yield _short(facts.short_run) if facts.short_run else NOTHING["training"]
        return
    yield f"Training, {metrics['step']:,} steps:"
    rows = [(text, figure(metrics[key])) for key, text in CURVE.items() if key in metrics]
    if "eval_loss" not in metrics:
        rows.append((CURVE["eval_loss"], NOT_MEASURED))
    rows += [
        (f"distance of `{key.removeprefix('drift/')}` from its initial value", figure(value))
        for key, value in metrics.items()
        if key.startswith("drift/")
    ]
    yield table(["", "value"], rows)


def _short(run: Json) -> str:
    before, after, source = (figure(run[key]) for key in ("before", "after", "source"))
    return (
        f"Complete training: {NOT_MEASURED}. A short run of {run['tokens']:,} tokens, {run['tokens_a_step']:,} per "
        f"step, with a learning rate of {run['learning_rate']:g}, of {run['model']}: loss on held-out text {before} "
        f"after the conversion, {after} after the run; the loss of the source is {source}."
    )


def _scores(evaluation: Json, name: str) -> Iterator[str]:
    suite, limit, compared = evaluation["suite"], evaluation["limit"], evaluation.get("compared")
    data, end = evaluation.get("data"), "beginning"
    if data:
        part, end = "" if limit is None else f", {limit} items", "end"
        yield f"Scores ± standard errors of {suite['name']} on `{data['name']}`{part}:"
    else:
        part = "" if limit is None else f", at most {limit} items of each task"
        tool = evaluation["versions"].get("lm_eval", "")
        yield f"Scores ± standard errors of lm-evaluation-harness {tool}, suite `{suite['name']}`{part}:"
    heads = ["task", "metric", "shots", "items", name]
    scores = evaluation["scores"]
    rows = [[row["name"], metric_name(row), _shots(row), f"{row['items']:,}", _score(row)] for row in scores]
    if compared:
        heads += [compared["with"], "change"]
        for row, mine, before in zip(rows, scores, compared["before"], strict=True):
            row += [_score(before), _change(mine, compared["scores"])]
    yield table(heads, rows)
    if compared:
        interval = f"{evaluation['confidence']:.0%}"
        yield f"Changes are relative to `{compared['with']}`, on the same items, with {interval} confidence intervals."
    for row in {row["name"]: row for row in scores if row["items_cut"]}.values():
        truncated = f"{row['items_cut']} of {row['items']} items"
        yield f"{row['name']}: {truncated} were too long, and their {end} was removed."
    if suite.get("missing"):
        yield f"Benchmarks of the suite {NOT_MEASURED}: {', '.join(suite['missing'])}."


def _shots(row: Json) -> str:
    return "" if row["shots"] is None else str(row["shots"])


def _score(row: Json) -> str:
    error = row["standard_error"]
    return figure(row["score"]) + ("" if error is None else f" ± {figure(error)}")


def _change(row: Json, changes: list[Json]) -> str:
    keys = ("name", "metric", "filter")
    comparison = next((candidate for candidate in changes if all(candidate[key] == row[key] for key in keys)), None)
    if comparison is None:
        return ""
    shown = _difference if comparison["scale"] == "difference" else change
    bounds = ", ".join(map(shown, comparison["interval"] or ()))
    return f"{shown(comparison['change'])} {f'[{bounds}] ' if bounds else ''}{comparison['verdict']}"


def _difference(value: float) -> str:
    """The difference of two scores, with its sign."""
    return f"{value:+.4f}"
