"""The other parts of a card: what the model is, its cost, how it was made, how it is used, its limits, the papers."""

import json
from collections.abc import Iterator
from typing import Any

from .commands import convert_command, recipe_yaml, relative
from .facts import Facts
from .papers import MECHANISMS
from .tables import NOT_MEASURED, change, count, table

COSTS = {
    "parameters": "parameters",
    "active_parameters": "parameters active for one token",
    "new_parameters": "parameters of the mechanisms",
    "kv_bytes_per_token": "KV cache, bytes a token",
    "decode_flops": "FLOPs to decode a token",
    "prefill_flops": "FLOPs a token of a text",
}
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def opening(facts: Facts) -> Iterator[str]:
    """What the model is."""
    kind = str(facts.config["model_type"]).removeprefix("crosshead_")
    yield f"# {facts.name}"
    if facts.mixers:
        names = " and ".join(MECHANISMS[name].title for name in facts.mixers)
        yield f"A `{kind}` language model with {names}, made with crosshead{_origin(facts)}."
        yield "\n".join(f"- `{name}`: {MECHANISMS[name].does}" for name in facts.mixers)
    else:
        yield f"A `{kind}` language model without mechanisms{_origin(facts)}: it loads as the stock model it is."
    if facts.plan:
        yield "This page is made from its recipe: it says how the model is made, what it costs, and what was measured."


def _origin(facts: Facts) -> str:
    if facts.base_model is not None:
        return f" from [{facts.base_model}](https://huggingface.co/{facts.base_model})"
    source = facts.conversion.get("source", {})
    return f" from `{source['name']}`" if source else ""


def changed(facts: Facts) -> Iterator[str]:
    """The mechanisms with their options, and the account of the tensors."""
    yield "## What changed"
    if facts.mixers:
        yield _code("json", json.dumps({"mixers": facts.mixers}, ensure_ascii=False))
    counts = facts.conversion.get("counts")
    if counts:
        told = ", ".join(f"{number:,} {fate}" for fate, number in counts.items())
        yield f"Tensors of the source and the model: {told}. `conversion.json` names every one."
    elif not facts.mixers:
        yield "Nothing that is on record."


def cost(facts: Facts) -> Iterator[str]:
    """Beside the same model without mechanisms, counted from the configuration."""
    yield "## What it costs"
    if not facts.cost:
        yield f"{NOT_MEASURED.capitalize()}."
        return
    found, stock, over = (facts.cost[part] for part in ("cost", "stock", "overhead"))
    yield (
        f"Counted from the configuration by `crosshead cost`, in {facts.cost['dtype']}, for texts of "
        f"{facts.cost['length']:,} tokens:"
    )
    if facts.mixers:
        rows = [
            [text, count(found[key]), count(stock[key]), change(over[key]) if key in over else ""]
            for key, text in COSTS.items()
        ]
        yield table(["", "this model", "without mechanisms", "change"], rows)
    else:
        yield table(["", "this model"], [[text, count(found[key])] for key, text in COSTS.items()])


def made(facts: Facts) -> Iterator[str]:
    """The exact commands."""
    yield "## How it is made" if facts.plan else "## How it was made"
    recipe = facts.training.get("recipe")
    if facts.plan:
        yield _code("sh", "\n".join([*facts.plan["convert"], facts.plan["train"]]))
        yield f"The recipe `{facts.plan['recipe']}` comes with crosshead."
        return
    if facts.conversion:
        yield _code("sh", convert_command(facts.conversion, facts.name if not recipe else _continued(recipe)))
        versions = ", ".join(f"{name} {found}" for name, found in facts.conversion.get("versions", {}).items())
        yield f"With {versions}. Options that were not given are written out, and paths left out."
    if recipe:
        yield _code("sh", "crosshead train recipe.yaml")
        processes = facts.training.get("processes", 1)
        yield f"on {processes} process{'es' if processes > 1 else ''}, with this as `recipe.yaml`, paths left out:"
        yield _code("yaml", recipe_yaml(recipe))
    if not facts.conversion and not recipe:
        yield "There is no record of it in the folder."


def _continued(recipe: Any) -> str:
    return relative(str(recipe["model"].get("path") or "model"))


def use(facts: Facts) -> Iterator[str]:
    """transformers, lm-evaluation-harness, peft."""
    trusted = ", trust_remote_code=True" if facts.remote_code else ""
    yield "## How to use it"
    yield (
        f"`{facts.name}` stands for the folder, or for the model's name on the Hub. Loading it needs torch and "
        "transformers alone" + ("; it runs the code that lies beside the weights." if trusted else ".")
    )
    load = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{facts.name}"{trusted.replace("True", "False")})',
        f'model = AutoModelForCausalLM.from_pretrained("{facts.name}"{trusted})',
        'tokens = tokenizer("Two heads are", return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**tokens, max_new_tokens=20)[0]))",
    ]
    yield _code("python", "\n".join(load))
    yield "Scores, with lm-evaluation-harness:"
    yield _code(
        "sh", f"lm_eval --model hf --model_args pretrained={facts.name}{trusted.replace(' ', '')} --tasks piqa"
    )
    yield "Adapters, with peft" + ("; the mechanisms are trained in full beside them:" if facts.mixers else ":")
    saved = [f"    modules_to_save={json.dumps(list(facts.mixers))},"] if facts.mixers else []
    peft = [
        "from peft import LoraConfig, get_peft_model",
        "",
        "adapter = LoraConfig(",
        f"    target_modules={json.dumps(PROJECTIONS)},",
        *saved,
        ")",
        "model = get_peft_model(model, adapter)",
    ]
    yield _code("python", "\n".join(peft))


def limits(facts: Facts) -> Iterator[str]:
    """What a user should know before they rely on it."""
    yield "## Limits"
    lines = [f"`{name}`: {MECHANISMS[name].limits}" for name in facts.mixers]
    if facts.conversion or facts.plan.get("convert"):
        lines.append("What its source gets wrong or says that it should not, this model does as well.")
    if facts.plan and "metrics" not in facts.training:
        beyond = ", beyond that short run" if facts.short_run else ""
        lines.append(f"The recipe's numbers have not been tried at this size{beyond}.")
    if not facts.plan:
        lines.append(
            "What the tables above do not show was not measured: neither its safety nor its use for any task."
        )
    yield "\n".join(f"- {line}" for line in lines)
    yield "## Licence"
    yield _licence(facts)


def _licence(facts: Facts) -> str:
    if not facts.licence:
        own = next((name for name in facts.files if name.upper().startswith(("LICENSE", "LICENCE"))), None)
        if own is not None:
            return f"The source's licence is in `{own}`."
        if facts.conversion or facts.plan.get("convert"):
            return "That of its source, which is not on record here: see the source's own page."
        return "Not on record."
    name = facts.licence.get("license_name") or facts.licence["license"]
    link = facts.licence.get("license_link")
    return f"{f'[{name}]({link})' if link else name}, as its source."


def citation(facts: Facts) -> Iterator[str]:
    """The papers of the mechanisms."""
    if facts.mixers:
        yield "## Citation"
        yield _code("bibtex", "\n\n".join(MECHANISMS[name].citation for name in facts.mixers))


def _code(language: str, text: str) -> str:
    fence = "```"
    return f"{fence}{language}\n{text}\n{fence}"
