"""Looks inside models at texts, and says what was seen as one JSON object: the page is made of that alone."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from crosshead.modeling.mechanisms.base import Mechanism

from ..open_model import Opened, load_model, open_model
from .layer import TOP, layer_record
from .matrices import description, matrix_records
from .pack import rounded
from .recorder import Seen, watching
from .text import LONGEST_TEXT, Text, check_family, read_text

Progress = Callable[[str, int, int], None]
"""Told the stage, how many layers are done, and how many there are."""
SIDES = ("patterns", "outputs")


def inspect_report(names: Sequence[str], texts: Mapping[str, str], progress: Progress) -> dict[str, Any]:
    """Everything that a page shows of one or two models at some texts, by the texts' names."""
    opened = [open_model(name) for name in names]
    for each in opened:
        check_family(each)
    read = [[read_text(each, *text) for text in texts.items()] for each in opened]
    models = [model_record(*each, progress) for each in zip(opened, read, strict=True)]
    return {"longest_text": LONGEST_TEXT, "top": TOP, "models": models}


def model_record(opened: Opened, texts: Sequence[Text], progress: Progress) -> dict[str, Any]:
    """One model: its sizes, what its mechanisms have learnt, and what its layers do at each text."""
    # On the processor, in float32, with the attention that returns its weights.
    model = load_model(opened, dtype=torch.float32, device_map=None, attn_implementation="eager")
    config = opened.config
    attentions = [layer.self_attn for layer in model.model.layers]
    mixers = [(layer, *each) for layer, attention in enumerate(attentions) for each in mixers_of(attention).items()]
    advance = _counter(progress, f"{opened.label}:", len(attentions) * len(texts))
    return {
        "name": opened.label,
        "model_type": config.model_type,
        "mixers": getattr(config, "mixers", None) or {},
        "mechanisms": {name: description(mixer) for _, name, mixer in mixers},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": len(attentions),
        "query_heads": config.num_attention_heads,
        "key_value_heads": config.num_key_value_heads,
        "head_dim": attentions[0].head_dim,
        "matrices": [record for place in mixers for record in matrix_records(*place)],
        "texts": [text_record(model, text, advance) for text in texts],
    }


def mixers_of(attention: Any) -> dict[str, Mechanism]:
    """The mechanisms of an attention module, by name; a stock one has none."""
    return dict(getattr(attention, "mixers", {}).items())


def _counter(progress: Progress, stage: str, total: int) -> Callable[[], None]:
    done = iter(range(1, total + 1))
    progress(stage, 0, total)
    return lambda: progress(stage, next(done), total)


@torch.no_grad()
def text_record(model: Any, text: Text, advance: Callable[[], None]) -> dict[str, Any]:
    """What the layers do at one text, layer by layer as they run: no more than one layer's weights are kept."""
    attentions = [layer.self_attn for layer in model.model.layers]
    layers: list[dict[str, Any]] = []

    def take(mixers: Iterable[Mechanism], seen: Seen) -> None:
        layers.append(layer_record(seen, mixers))
        advance()

    with ExitStack() as stack:
        for attention in attentions:
            stack.enter_context(watching(attention, partial(take, mixers_of(attention).values())))
        model(text.ids, use_cache=False)
    means = {side: [layer["mean_similarity"][side] for layer in layers] for side in SIDES}
    known = {side: [mean for mean in each if mean is not None] for side, each in means.items()}
    return {
        "name": text.name,
        "tokens": text.pieces,
        "starts": text.starts,
        "mean_similarity": {side: rounded(sum(each) / len(each)) if each else None for side, each in known.items()},
        "layers": layers,
    }
