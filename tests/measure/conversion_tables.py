"""Tables of the pages on conversion: loss with fewer heads, time and memory of large checkpoints, and limits."""

from collections.abc import Iterable, Mapping
from typing import Any

from backbone_support import support_table
from crosshead.conversion.architectures.encoder_limits import LATENT_LIMITS, LIMITS, Limit
from crosshead.modeling import BACKBONES
from crosshead.modeling.backbones.transnext import TRANSNEXT_LIMITS

Content = Mapping[str, Any]


def heads_table(report: Content) -> str:
    """Table of the loss increase over the source and the conversion time, per model and conversion (heads.json)."""
    lines = ["| model | converted to | loss above its source, in nats | time |", "| --- | --- | ---: | ---: |"]
    for name, results in report.items():
        for case, measured in results["cases"].items():
            settings = {**results, **measured}
            machine, threads = settings["machine"], settings["machine"]["threads"]
            cores = f"{threads} CPU thread{'s' * (threads > 1)}"
            on = machine["accelerator"] if settings.get("device") == "cuda" else cores
            above = f"{measured['above_source']:+.4f} ({results['source']:.4f})"
            lines.append(f"| {name} | {_changed_to(case)} | {above} | {measured['seconds']:.0f} s, {on} |")
    return "\n".join(lines) + "\n"


SAME_TEXT = ", calibrated on the same kind of text"
"""Suffix of names in `heads.json`."""
CONVERSIONS = (
    ("`explicit`, 2 of 3 component heads", "3 heads", "aligned:2", "explicit"),
    ("`explicit`, `--cache 75%`", "3 heads", "auto:0.75", None),
    ("`explicit`, `--cache 50%`", "3 heads", "auto:0.5", "explicit-half"),
    ("`mixture`, 7 of 9 heads active", "9 heads", "mixture:7", "mixture"),
    ("`mixture`, 5 of 9 heads active", "9 heads", "mixture:5", "mixture-5"),
    ("`differential`, `version=2` or `half_values=true`", "9 heads", "differential:2", None),
    ("the paper's method: `explicit`, 2 of 3, `method=svd`", "3 heads", "svd:2", None),
    ("the paper's method: `mixture`, 7 of 9, `method=paper`", "9 heads", "mixture:7:paper", None),
)
"""Conversions of SmolLM2-135M: description, end of the name and case in `heads.json`, name in `recovery.json`."""


def conversions_table(heads: Content, recovery: Content) -> str:
    """Table of the loss increase of the most important conversions: without training, and after a short training."""
    lines = ["| converted to | default text | WikiText | trained |", "| --- | ---: | ---: | ---: |"]
    for words, name, case, trained in CONVERSIONS:
        names = (f"SmolLM2-135M, {name}", f"SmolLM2-135M, {name}{SAME_TEXT}")
        losses = [heads.get(model, {}).get("cases", {}).get(case, {}).get("above_source") for model in names]
        losses.append(recovery.get(trained, {}).get("above_control"))
        lines.append(f"| {words} | {' | '.join('' if loss is None else f'{loss:+.3f}' for loss in losses)} |")
    return "\n".join(lines) + "\n"


def _changed_to(case: str) -> str:
    """The description of a case of `component_heads.py`."""
    method, value, *rest = case.split(":")
    suffix = f", in {rest[0]}" if rest else ""
    if method == "mixture":
        return f"`mixture`, {value} heads active" + (f", `method={rest[0]}`" if rest else "")
    if method == "differential":
        return f"`differential`, `{'version=2' if value == '2' else 'half_values=true'}`{suffix}"
    if method == "active":
        return f"`mixture`, `--active {float(value):.0%}`"
    if method == "auto":
        return f"`explicit`, `--cache {float(value):.0%}`{suffix}"
    if method == "pooled":
        return f"{value} key and value heads, means of neighbouring ones"
    counts, _, groups = value.partition("/")
    grouping = {"": "", "auto": ", groups chosen by the conversion"}.get(groups, f", `groups={groups}`")
    method_text = f", `method={method}`" if method != "aligned" else ""
    return f"`explicit`, {counts} component heads{grouping}{method_text}{suffix}"


def folded_table(report: Content) -> str:
    """Table of the time per decoded token of folded models, relative to their source."""
    lines = ["| runs in | tokens in the cache | KV heads | time of a token | of the source's |"]
    lines.append("| --- | ---: | --- | ---: | ---: |")
    own = f"{report['shape']['num_key_value_heads']} of {report['shape']['head_dim']} features (source)"
    for engine in ("transformers", "vllm"):
        for length, models in report[engine].items():
            for name, times_of_model in models.items():
                heads = own if name == "source" else name
                times = f"{times_of_model['seconds'] * 1e3:.2f} ms | {times_of_model['ratio']:.2f}"
                lines.append(f"| {engine} | {int(length):,} | {heads} | {times} |")
    machine = report["machine"]
    layers = f"{report['shape']['num_hidden_layers']} layers of random weights, float32"
    return "\n".join([*lines, "", f"{layers}; {machine['processor']}, {machine['threads']} threads."]) + "\n"


def streaming_table(report: Content) -> str:
    """Table of peak memory, and of the time of a neutral conversion relative to a copy."""
    lines = [
        f"| a checkpoint of {report['bytes'] / 1e9:.2f} GB | time relative to `cp -r` | peak memory |",
        "| --- | ---: | ---: |",
    ]
    neutral = report["neutral"]
    relative = f"{neutral['median_ratio']:.2f} times, in {neutral['median_ours']:.0f} s"
    lines.append(f"| neutral conversion | {relative} | {neutral['peak_bytes'] / 1e9:.2f} GB |")
    for name, description in (
        ("calibration", "calibration"),
        ("virtual-heads", "`explicit` with half as many component heads, from this calibration"),
    ):
        result = report[name]
        lines.append(f"| {description} | | {result['peak_bytes'] / 1e9:.2f} GB |")
    return "\n".join(lines) + "\n"


def embedding_table(report: Content) -> str:
    """Table of the cosines between sentence embeddings of a conversion and of its source."""
    lines = ["| all-MiniLM-L6-v2, converted with | mean cosine | smallest | largest difference |"]
    lines.append("| --- | ---: | ---: | ---: |")
    for name, cosines in report["cases"].items():
        difference = f"{cosines['difference']:.1g}" if "difference" in cosines else ""
        lines.append(f"| {name} | {cosines['mean']:.4f} | {cosines['minimum']:.4f} | {difference} |")
    lines.append("")
    lines.append(
        f"Of {report['sentences']} held-out sentences of WikiText-2. The {report['calibration']:,} calibration "
        "sentences are of the same text; other conversions read the default text. The last column is of neutral "
        "conversions: of all numbers in embeddings of length one, in float32. Trained: all weights, "
        f"{report['steps']} steps with the loss of SimCSE, which moves the embeddings (`make measure-embeddings`)."
    )
    return "\n".join(lines) + "\n"


def images_table(report: Content) -> str:
    """Table of the time of `mixture` in a vision transformer, relative to stock attention."""
    lines = ["| part of a layer | time | of stock |", "| --- | ---: | ---: |"]
    for name, times in report["measured"].items():
        lines.append(f"| {name} | {min(times['ours']) * 1e3:.1f} ms | {times['ratio_of_best']:.2f} |")
    mixture, machine = report["mixers"]["mixture"], report["machine"]
    heads = f"{mixture['active_heads']} of 12 heads active, {mixture['shared_heads']} of them always"
    return (
        "\n".join([*lines, "", f"ViT-Base, {report['tokens']:,} tokens, {heads}; {machine['processor']}, one thread."])
        + "\n"
    )


def transnext_table() -> str:
    """Table of the options that TransNeXt does not support."""
    lines = ["| option | layers | reason |", "| --- | --- | --- |"]
    for limit in TRANSNEXT_LIMITS:
        layers = "all" if limit.everywhere else "with windows"
        lines.append(f"| `{limit.option}` | {layers} | {limit.reason} |")
    return "\n".join(lines) + "\n"


def limits_table(limits: Iterable[Limit] = LIMITS) -> str:
    """Table of unsupported conversions, by default those of encoders."""
    lines = ["| conversion | reason |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {limit.conversion} | {limit.reason} |" for limit in limits)]) + "\n"


def latent_limits_table() -> str:
    """Table of the conversions that decoders with multi-head latent attention do not support."""
    return limits_table(LATENT_LIMITS)


def refused_table() -> str:
    """Tables of the mechanisms and options that the config of each backbone rejects."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for config in BACKBONES:
        for refusal in getattr(config, "refused", ()):
            value = str(refusal.value).lower() if isinstance(refusal.value, bool) else refusal.value
            option = f"`{refusal.mechanism}`" + (f" with `{refusal.option}: {value}`" if refusal.option else "")
            reasons.setdefault((option, refusal.reason), []).append(config.class_prefix.removeprefix("Crosshead"))
    lines = ["| backbone | option | reason |", "| --- | --- | --- |"]
    rows = (f"| {', '.join(names)} | {option} | {reason} |" for (option, reason), names in reasons.items())
    return "\n".join([support_table(), *lines, *rows]) + "\n"
