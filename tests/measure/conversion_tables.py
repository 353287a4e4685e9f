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
    for name, found in report.items():
        for case, got in found["cases"].items():
            where = {**found, **got}
            machine, threads = where["machine"], where["machine"]["threads"]
            cores = f"{threads} CPU thread{'s' * (threads > 1)}"
            on = machine["accelerator"] if where.get("device") == "cuda" else cores
            above = f"{got['above_source']:+.4f} ({found['source']:.4f})"
            lines.append(f"| {name} | {_changed_to(case)} | {above} | {got['seconds']:.0f} s, {on} |")
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
        losses = [heads.get(each, {}).get("cases", {}).get(case, {}).get("above_source") for each in names]
        losses.append(recovery.get(trained, {}).get("above_control"))
        lines.append(f"| {words} | {' | '.join('' if loss is None else f'{loss:+.3f}' for loss in losses)} |")
    return "\n".join(lines) + "\n"


def _changed_to(case: str) -> str:
    """The description of a case of `component_heads.py`."""
    method, what, *rest = case.split(":")
    suffix = f", in {rest[0]}" if rest else ""
    if method == "mixture":
        return f"`mixture`, {what} heads active" + (f", `method={rest[0]}`" if rest else "")
    if method == "differential":
        return f"`differential`, `{'version=2' if what == '2' else 'half_values=true'}`{suffix}"
    if method == "active":
        return f"`mixture`, `--active {float(what):.0%}`"
    if method == "auto":
        return f"`explicit`, `--cache {float(what):.0%}`{suffix}"
    if method == "pooled":
        return f"{what} key and value heads, means of neighbouring ones"
    counts, _, groups = what.partition("/")
    told = {"": "", "auto": ", groups chosen by the conversion"}.get(groups, f", `groups={groups}`")
    way = f", `method={method}`" if method != "aligned" else ""
    return f"`explicit`, {counts} component heads{told}{way}{suffix}"


def folded_table(report: Content) -> str:
    """Table of the time per decoded token of folded models, relative to their source."""
    lines = ["| runs in | tokens in the cache | KV heads | time of a token | of the source's |"]
    lines.append("| --- | ---: | --- | ---: | ---: |")
    own = f"{report['shape']['num_key_value_heads']} of {report['shape']['head_dim']} features (source)"
    for engine in ("transformers", "vllm"):
        for length, found in report[engine].items():
            for name, got in found.items():
                heads = own if name == "source" else name
                times = f"{got['seconds'] * 1e3:.2f} ms | {got['ratio']:.2f}"
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
    beside = f"{neutral['median_ratio']:.2f} times, in {neutral['median_ours']:.0f} s"
    lines.append(f"| neutral conversion | {beside} | {neutral['peak_bytes'] / 1e9:.2f} GB |")
    for name, told in (
        ("calibration", "calibration"),
        ("virtual-heads", "`explicit` with half as many component heads, from this calibration"),
    ):
        found = report[name]
        lines.append(f"| {told} | | {found['peak_bytes'] / 1e9:.2f} GB |")
    return "\n".join(lines) + "\n"


def embedding_table(report: Content) -> str:
    """Table of the cosines between sentence embeddings of a conversion and of its source."""
    lines = ["| all-MiniLM-L6-v2, converted with | mean cosine | smallest | largest difference |"]
    lines.append("| --- | ---: | ---: | ---: |")
    for name, found in report["cases"].items():
        difference = f"{found['difference']:.1g}" if "difference" in found else ""
        lines.append(f"| {name} | {found['mean']:.4f} | {found['minimum']:.4f} | {difference} |")
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
    for name, found in report["measured"].items():
        lines.append(f"| {name} | {min(found['ours']) * 1e3:.1f} ms | {found['ratio_of_best']:.2f} |")
    mixture, machine = report["mixers"]["mixture"], report["machine"]
    told = f"{mixture['active_heads']} of 12 heads active, {mixture['shared_heads']} of them always"
    return (
        "\n".join([*lines, "", f"ViT-Base, {report['tokens']:,} tokens, {told}; {machine['processor']}, one thread."])
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
        for each in getattr(config, "refused", ()):
            value = str(each.value).lower() if isinstance(each.value, bool) else each.value
            option = f"`{each.mechanism}`" + (f" with `{each.option}: {value}`" if each.option else "")
            reasons.setdefault((option, each.reason), []).append(config.class_prefix.removeprefix("Crosshead"))
    lines = ["| backbone | option | reason |", "| --- | --- | --- |"]
    rows = (f"| {', '.join(names)} | {option} | {reason} |" for (option, reason), names in reasons.items())
    return "\n".join([support_table(), *lines, *rows]) + "\n"
