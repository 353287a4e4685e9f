"""Writes the sections of a card: introduction, changes, cost, provenance, usage, limits, licence and citation."""

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

from .commands import convert_command, recipe_yaml, relative
from .facts import Facts
from .papers import described
from .tables import NOT_MEASURED, change, table
from .tasks import DIFFUSION, projections, task_of

COSTS = {
    "parameters": "parameters",
    "active_parameters": "parameters active for one token",
    "new_parameters": "parameters of the mechanisms",
    "kv_bytes_per_token": "KV cache, bytes per token",
    "cross_kv_bytes_per_token": "KV cache of cross-attention, bytes per token of the input",
    "decode_flops": "FLOPs per decoded token",
    "prefill_flops": "FLOPs per token of a prompt",
}
"""Key of a cost report -> row title."""
TRANSFORMERS = "5.17 or newer (tested up to 5.24)"
"""Versions that load published code; those of constraints-oldest.txt and constraints-newest.txt."""
TEXT_INPUT = ("tokens", "tokenizer", "AutoTokenizer", '"Two heads are"')
IMAGE_INPUT = ("image", "processor", "AutoImageProcessor", 'Image.new("{}", (640, 480))')
"""For the example: variable of the input, variable and class of its tokenizer or processor, and the raw input."""
DIFFUSION_EXAMPLE = """import torch
from diffusers import AutoModel, DDPMScheduler

model = AutoModel.from_pretrained("{name}", trust_remote_code=True).eval()
schedule = DDPMScheduler.from_pretrained("{name}")
size, label = model.config.sample_size, torch.tensor([0])
sample = torch.randn(1, model.config.in_channels, size, size)
with torch.no_grad():
    for time in schedule.timesteps:
        output = model(sample, time.expand(1), label).sample
        sample = schedule.step(output, time, sample).prev_sample"""
"""Python code that samples an image of class 0, or the latent of one."""


def opening(facts: Facts) -> Iterator[str]:
    """The introduction."""
    kind = str(facts.config.get("model_type", "dit")).removeprefix("crosshead_")
    yield f"# {facts.name}"
    noun = task_of(facts.config).noun
    if facts.mixers:
        descriptions = described(facts.mixers)
        names = " and ".join(mechanism.title for mechanism in descriptions.values())
        yield f"A `{kind}` {noun} with {names}, made with crosshead{_origin(facts)}."
        yield "\n".join(f"- `{name}`: {mechanism.does}" for name, mechanism in descriptions.items())
    else:
        yield f"A `{kind}` {noun} without mechanisms{_origin(facts)}: it loads as a stock model."
    if facts.plan:
        yield "This page is generated from the model's recipe, its config and measured results."


def plain(text: str) -> str:
    """The text without characters that would end a code span in Markdown."""
    return re.sub(r"[`<>\s]+", " ", text)


def _origin(facts: Facts) -> str:
    if facts.base_model is not None:
        return f" from [{facts.base_model}](https://huggingface.co/{facts.base_model})"
    source = facts.conversion.get("source", {})
    return f" from `{plain(source['name'])}`" if source else ""


def changes(facts: Facts) -> Iterator[str]:
    """The mechanisms with their options, and the number of changed tensors."""
    yield "## Changes"
    if facts.mixers:
        yield _code("json", json.dumps({"mixers": facts.config["mixers"]}, ensure_ascii=False))
    counts = facts.conversion.get("counts")
    if counts:
        actions = ", ".join(f"{number:,} {action}" for action, number in counts.items())
        yield f"Tensors of the source and the model: {actions}. `conversion.json` lists them."
    elif not facts.mixers:
        yield "No changes are recorded."


def cost(facts: Facts) -> Iterator[str]:
    """Parameters, cache and FLOPs, compared with the same model without mechanisms."""
    yield "## Cost"
    if not facts.cost:
        yield f"{NOT_MEASURED.capitalize()}."
        return
    counts, stock, overhead = (facts.cost[part] for part in ("cost", "stock", "overhead"))
    yield (
        f"Computed from the config by `crosshead cost`, in {facts.cost['dtype']}, for "
        f"{_inputs(facts)} of {facts.cost['length']:,} tokens:"
    )
    # An encoder has no cache, no prompt, and does not decode.
    costs = {key: text for key, text in COSTS.items() if counts[key] or key == "new_parameters"}
    if not counts["decode_flops"]:
        costs["prefill_flops"] = "FLOPs per token"
    if facts.mixers:
        rows = [
            [text, f"{counts[key]:,}", f"{stock[key]:,}", change(overhead[key]) if key in overhead else ""]
            for key, text in costs.items()
        ]
        yield table(["", "this model", "without mechanisms", "change"], rows)
    else:
        yield table(["", "this model"], [[text, f"{counts[key]:,}"] for key, text in costs.items()])


def _inputs(facts: Facts) -> str:
    task = task_of(facts.config)
    return "latents" if task is DIFFUSION else "images" if task.reads_images else "texts"


def provenance(facts: Facts) -> Iterator[str]:
    """The commands that make the model, with the recipe of its training."""
    yield "## How it is made" if facts.plan else "## How it was made"
    recipe = facts.training.get("recipe")
    if facts.plan:
        yield _code("sh", "\n".join([*facts.plan["convert"], facts.plan["train"]]))
        yield f"The recipe `{facts.plan['recipe']}` is part of crosshead."
        return
    if facts.conversion:
        yield _code("sh", convert_command(facts.conversion, facts.name if not recipe else _continued(recipe)))
        versions = ", ".join(f"{name} {version}" for name, version in facts.conversion.get("versions", {}).items())
        yield f"With {versions}. Default options are included; directories are removed from paths."
    if recipe:
        yield _code("sh", "crosshead train recipe.yaml")
        processes = facts.training.get("processes", 1)
        plural = "es" if processes > 1 else ""
        yield f"on {processes} process{plural}, with this `recipe.yaml`; directories are removed from paths:"
        yield _code("yaml", recipe_yaml(recipe))
    if not facts.conversion and not recipe:
        yield "The folder has no record of it."


def _continued(recipe: Any) -> str:
    return relative(str(recipe["model"].get("path") or "model"))


def usage(facts: Facts) -> Iterator[str]:
    """Examples for transformers, lm-evaluation-harness and peft."""
    trusted, task = ", trust_remote_code=True" if facts.remote_code else "", task_of(facts.config)
    yield "## How to use it"
    if task is DIFFUSION:
        yield (
            f"`{facts.name}` is the folder or the Hub id of the model. Loading it needs torch, transformers and "
            "diffusers; it runs the code in the folder."
        )
        yield _code("python", DIFFUSION_EXAMPLE.format(name=facts.name))
        return
    yield (
        f"`{facts.name}` is the folder or the Hub id of the model. Loading it needs only torch and transformers"
        + (f" {TRANSFORMERS}; it runs the code in the folder." if trusted else ".")
        + (" The image processor also needs Pillow." if task.reads_images else "")
    )
    variable, name, processor, value = IMAGE_INPUT if task.reads_images else TEXT_INPUT
    mode = "L" if facts.config.get("num_channels") == 1 else "RGB"
    load = [
        *(["from PIL import Image"] if task.reads_images else []),
        f"from transformers import {task.auto_class}, {processor}",
        "",
        f'{name} = {processor}.from_pretrained("{facts.name}"{trusted.replace("True", "False")})',
        f'model = {task.auto_class}.from_pretrained("{facts.name}"{trusted})',
        f'{variable} = {name}({value.format(mode)}, return_tensors="pt")',
        task.call,
    ]
    yield _code("python", "\n".join(load))
    if task.generates:
        yield "Scores, with lm-evaluation-harness:"
        arguments = shlex.quote(f"pretrained={facts.name}{trusted.replace(' ', '')}")
        yield _code("sh", f"lm_eval --model hf --model_args {arguments} --tasks piqa")
    yield "Adapters, with peft" + ("; the mechanisms are trained in full:" if facts.mixers else ":")
    saved = [f"    modules_to_save={json.dumps(list(facts.mixers))},"] if facts.mixers else []
    peft = [
        "from peft import LoraConfig, get_peft_model",
        "",
        "adapter = LoraConfig(",
        f"    target_modules={json.dumps(projections(facts.config))},",
        *saved,
        ")",
        "model = get_peft_model(model, adapter)",
    ]
    yield _code("python", "\n".join(peft))


def limits(facts: Facts) -> Iterator[str]:
    """Limits of the mechanisms and of the measurements, and the section with the licence."""
    yield "## Limits"
    lines = [f"`{name}`: {mechanism.limits}" for name, mechanism in described(facts.mixers).items()]
    if facts.conversion or facts.plan.get("convert"):
        lines.append("Errors and harmful outputs of its source can also occur in this model.")
    if facts.plan and "metrics" not in facts.training:
        beyond = ", except in the short run above" if facts.short_run else ""
        lines.append(f"The hyperparameters of the recipe have not been tested at this size{beyond}.")
    if not facts.plan:
        lines.append("Only the results above were measured. Safety and suitability for a task were not.")
    yield "\n".join(f"- {line}" for line in lines)
    yield "## Licence"
    yield _licence(facts)


def _licence(facts: Facts) -> str:
    if not facts.licence:
        own = next((name for name in facts.files if name.upper().startswith(("LICENSE", "LICENCE"))), None)
        if own is not None:
            return f"The licence of the source is in `{own}`."
        if facts.conversion or facts.plan.get("convert"):
            return "The licence of its source, which is not recorded here: see the page of the source."
        return "Not recorded."
    name = facts.licence.get("license_name") or facts.licence["license"]
    link = facts.licence.get("license_link")
    return f"{f'[{name}]({link})' if link else name}, like its source."


def citation(facts: Facts) -> Iterator[str]:
    """The papers of the mechanisms."""
    if facts.mixers:
        yield "## Citation"
        yield _code("bibtex", "\n\n".join(mechanism.citation for mechanism in described(facts.mixers).values()))


def _code(language: str, text: str) -> str:
    runs = re.findall("`{3,}", text)
    fence = max(["```", *(f"{run}`" for run in runs)], key=len)
    return f"{fence}{language}\n{text}\n{fence}"
