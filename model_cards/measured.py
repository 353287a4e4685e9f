"""The part of a card that tells what was measured, and what was not."""

from collections.abc import Iterator

from .facts import Facts, Json
from .tables import NOT_MEASURED, change, figure, table

NOTHING = {
    "conversion": f"Beside its source: {NOT_MEASURED}.",
    "training": f"Training: {NOT_MEASURED}.",
    "scores": f"Benchmarks: {NOT_MEASURED}.",
}
ROWS = {
    "loss": ("loss_before", "loss_after"),
    "perplexity": ("perplexity_before", "perplexity_after"),
    "KV cache, bytes a token": ("kv_bytes_per_token_before", "kv_bytes_per_token_after"),
}
"""What verification measures on both, the source and the model."""
SINGLE = {
    "KL divergence from the source, nats": "kl_divergence",
    "greatest difference of a logit": "greatest_logit_difference",
    "positions with the same likeliest token": "greedy_agreement",
}
CURVE = {"loss": "loss, last logged", "train_loss": "loss, mean of the run", "eval_loss": "loss on held-out text"}


def measured(facts: Facts) -> Iterator[str]:
    """Paragraphs and tables."""
    yield "## What was measured"
    yield from _conversion(facts)
    yield from _training(facts)
    if not facts.evaluations:
        yield NOTHING["scores"]
    for evaluation in facts.evaluations:
        yield from _scores(evaluation, facts.name)


def _conversion(facts: Facts) -> Iterator[str]:
    """Only where there is a source."""
    if not facts.conversion and not facts.plan.get("convert"):
        return
    found = facts.conversion.get("verification")
    if not found:
        yield NOTHING["conversion"]
        return
    when = ", after the conversion and before training" if facts.training else ""
    text = found["sample"]["text"].split(",")[0]
    yield f"Beside its source{when}, on {found['windows']} windows of {found['window_length']} tokens ({text}):"
    rows = [(name, *(_shown(found[key]) for key in pair)) for name, pair in ROWS.items()]
    rows += [(name, "", _shown(found[key])) for name, key in SINGLE.items()]
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
        (f"how far `{key.removeprefix('moved/')}` is from its start", figure(value))
        for key, value in metrics.items()
        if key.startswith("moved/")
    ]
    yield table(["", "value"], rows)


def _short(run: Json) -> str:
    before, after, source = (figure(run[key]) for key in ("before", "after", "source"))
    return (
        f"Training to its end: {NOT_MEASURED}. A short run, of {run['tokens']:,} tokens, {run['tokens_a_step']:,} a "
        f"step, at a learning rate of {run['learning_rate']:g}: loss on held-out text {before} when it was converted, "
        f"{after} afterwards; the source's is {source}."
    )


def _scores(evaluation: Json, name: str) -> Iterator[str]:
    suite, limit, compared = evaluation["suite"], evaluation["limit"], evaluation.get("compared")
    part = "" if limit is None else f", at most {limit} items of each task"
    tool = evaluation["versions"].get("lm_eval", "")
    yield f"Scores ± standard errors of lm-evaluation-harness {tool}, suite `{suite['name']}`{part}:"
    heads = ["task", "metric", "shots", "items", name]
    rows = [[row["name"], _metric(row), _shots(row), f"{row['items']:,}", _score(row)] for row in evaluation["scores"]]
    if compared:
        heads += [compared["with"], "change"]
        for row, mine, before in zip(rows, evaluation["scores"], compared["before"], strict=True):
            row += [_score(before), _change(mine, compared["scores"])]
    yield table(heads, rows)
    if compared:
        interval = f"{evaluation['confidence']:.0%}"
        yield f"Changes are from `{compared['with']}`, on the same items, with {interval} intervals."
    for row in evaluation["scores"]:
        if row["items_cut"]:
            yield f"{row['name']}: {row['items_cut']} of {row['items']} items lost their beginning, being too long."
    if suite.get("missing"):
        yield f"Of the suite, {NOT_MEASURED}: {', '.join(suite['missing'])}."


def _metric(row: Json) -> str:
    return row["metric"] if row["filter"] == "none" else f"{row['metric']} ({row['filter']})"


def _shots(row: Json) -> str:
    return "" if row["shots"] is None else str(row["shots"])


def _score(row: Json) -> str:
    error = row["standard_error"]
    return figure(row["score"]) + ("" if error is None else f" ± {figure(error)}")


def _change(row: Json, changes: list[Json]) -> str:
    keys = ("name", "metric", "filter")
    found = next((each for each in changes if all(each[key] == row[key] for key in keys)), None)
    if found is None:
        return ""
    shown = figure_change if found["scale"] == "difference" else change
    bounds = ", ".join(map(shown, found["interval"] or ()))
    return f"{shown(found['change'])} {f'[{bounds}] ' if bounds else ''}{found['verdict']}"


def figure_change(value: float) -> str:
    """A difference of two scores."""
    return f"{value:+.4f}"
