"""A whole recipe: loaded from a YAML file with `--set` changes, with checks that involve several sections.

The loss is the loss of the objective plus the load-balancing losses that the model's configuration enables. Paths
are relative to the working directory.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from crosshead.common.errors import RecipeError
from crosshead.common.yaml_text import NULL, parse_yaml, read_yaml
from crosshead.modeling.options import unknown

from ..data.sampling_order import SourceOrder
from . import sections
from .field_types import PathOrId
from .model_config import check_expert_bias, model_config
from .objectives import (
    NEXT_TOKEN,
    OBJECTIVES,
    TOKENS,
    AnyObjective,
    Classes,
    Noise,
    check_classes,
    check_sources,
    check_unit,
)


@dataclass(frozen=True)
class Recipe(sections.Section):
    """A whole training run."""

    output: PathOrId
    """Folder for checkpoints, metrics and the final model."""
    model: sections.ModelOptions
    data: sections.DataOptions
    train: sections.TrainOptions
    objective: AnyObjective = NEXT_TOKEN
    """Training objective: the task that the model learns, such as next-token prediction."""
    distillation: sections.Distillation | None = None
    watch: sections.WatchOptions = field(default_factory=sections.WatchOptions)
    checkpoints: sections.CheckpointOptions = field(default_factory=sections.CheckpointOptions)
    hub: sections.HubOptions | None = None
    sweep: sections.SweepOptions | None = None

    def __post_init__(self) -> None:
        self._check_objective()
        self._check_steps()
        if self.watch.evaluate_every and not self.evaluates:
            raise RecipeError(
                f"watch.evaluate_every={self.watch.evaluate_every} has no text to evaluate on: set data.held_out or "
                "data.evaluation, or leave it out"
            )
        SourceOrder([source.weight for source in self.data.sources])  # reject bad weights before the tokenisation
        if self.model.config is None:
            return
        config = model_config(self.model.config, self.objective)
        check_expert_bias(config, self.train.expert_bias_rate)
        if self.data.length > getattr(config, "max_position_embeddings", sys.maxsize):
            raise RecipeError(
                f"data.length={self.data.length} is more than model.config.max_position_embeddings="
                f"{config.max_position_embeddings}: lower it, or raise that"
            )

    def _check_objective(self) -> None:
        """Raise `RecipeError` if another section does not fit the objective."""
        name, train = self.objective.name, self.train
        check_unit(self.objective, train)
        check_sources(self.objective, self.data.sources + self.data.evaluation)
        if isinstance(self.objective, Classes):
            check_classes(self.objective, self.model.path, train.micro_batch)
        if self.counts_tokens and self.model.path is None and self.model.tokenizer is None:
            raise RecipeError("model.tokenizer is missing: a model from scratch has none")
        is_noise = isinstance(self.objective, Noise)
        if self.model.vae is not None and not is_noise:
            raise RecipeError(f"model.vae={self.model.vae} is for the objective noise, not for {name}: leave it out")
        if is_noise and (self.model.path is not None or self.model.tokenizer is not None):
            raise RecipeError("model: the objective noise starts from `config`: leave path and tokenizer out")
        if train.trainable != "all" and (is_noise or getattr(self.objective, "new_classifier", False)):
            raise RecipeError(f"train.trainable={train.trainable!r} would leave new random weights untrained: use all")
        if is_noise and self.hub is not None:
            raise RecipeError("hub is not for the objective noise: upload the result with `hf upload`")
        if name == NEXT_TOKEN.name:
            return
        for key, is_given in {
            "distillation": self.distillation is not None,
            "data.separate_documents": self.data.separate_documents,
            "train.lora": train.lora is not None,
            "model.tokenizer": self.model.tokenizer is not None and not self.counts_tokens,
        }.items():
            if is_given:
                raise RecipeError(
                    f"{key} is for the objective {NEXT_TOKEN.name} alone, and this is {name}: leave it out"
                )

    def _check_steps(self) -> None:
        train, length = self.train, self.data.length
        if self.counts_tokens and self.per_step % length:
            nearest = max(1, (self.per_step + length // 2) // length) * length
            raise RecipeError(
                f"train.batch_tokens={self.per_step} is not a multiple of data.length={length}: "
                f"the nearest is {nearest}"
            )
        if self.batch_size % train.micro_batch:
            raise RecipeError(
                f"train.micro_batch={train.micro_batch} does not divide the {self.batch_size} sequences of a step"
            )
        if train.warmup and self.warmup_steps >= self.steps:
            unit = self.objective.unit
            raise RecipeError(
                f"train.warmup={train.warmup:g} leaves no steps after it: train.{unit}={self.total} are "
                f"{self.steps} steps of train.batch_{unit}={self.per_step}"
            )

    @property
    def counts_tokens(self) -> bool:
        """Whether the objective counts tokens rather than samples."""
        return self.objective.unit == TOKENS

    @property
    def total(self) -> int:
        """Number of tokens or samples of the whole training."""
        return (self.train.tokens if self.counts_tokens else self.train.samples) or 0

    @property
    def per_step(self) -> int:
        """Number of tokens or samples per optimizer step."""
        return (self.train.batch_tokens if self.counts_tokens else self.train.batch_samples) or 0

    @property
    def batch_size(self) -> int:
        """Number of sequences or samples per optimizer step, over all processes."""
        return self.per_step // self.data.length if self.counts_tokens else self.per_step

    @property
    def steps(self) -> int:
        """Number of optimizer steps of the whole training."""
        return -(-self.total // self.per_step)

    @property
    def warmup_steps(self) -> int:
        """Number of steps until the learning rate reaches its peak."""
        warmup = self.train.warmup
        return round(warmup * self.steps) if warmup < 1 else int(warmup)

    @property
    def attention_loss_steps(self) -> int:
        """Number of first steps (transfer, then matching) with a loss on attention outputs instead of predictions."""
        return self.distillation.transfer_steps + self.distillation.match_steps if self.distillation else 0

    @property
    def loss_changes(self) -> tuple[int, ...]:
        """Steps after which the training loss changes to another kind."""
        return (self.distillation.transfer_steps, self.attention_loss_steps) if self.distillation else ()

    @property
    def evaluates(self) -> bool:
        """Whether there is data for evaluation."""
        return bool(self.data.held_out or self.data.evaluation)


ADAPTER = TypeAdapter(Recipe)
PACKAGE = Path(__file__).parents[1]
FOLDERS = ("papers", "small")
"""Folders of the recipes that are shipped with the package."""
EXPECTED = {
    "dataclass_type": "input should be a mapping, one `key: value` a line",
    "dict_type": "input should be a mapping, one `key: value` a line",
    "tuple_type": "input should be a list, as in [a, b]",
    "too_short": "input should have at least {min_length} entries",
    "too_long": "input should have at most {max_length} entries",
}
"""pydantic error type -> message in YAML terms, where pydantic's own message uses Python terms; with its fields."""


def shipped_recipes() -> dict[str, Path]:
    """Return the paths of the shipped recipes, by name, such as `small/smollm2_knocking`."""
    paths = [path for folder in FOLDERS for path in sorted((PACKAGE / folder).glob("*.yaml"))]
    return {path.relative_to(PACKAGE).with_suffix("").as_posix(): path for path in paths}


def load_recipe(name: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """Load a recipe from a file, or a shipped recipe by its name; each of `changes` is `section.key=value`."""
    path = _find(str(name))
    content = read_yaml(path, f"the recipe {path}", RecipeError)
    for change in changes:
        _change(content, change)
    try:
        return ADAPTER.validate_python(content)
    except ValidationError as error:
        raise RecipeError(f"{path}: {_message(error)}") from None


def json_schema() -> str:
    """Return the JSON schema of recipes, which editors use for completion and validation."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | ADAPTER.json_schema()
    return json.dumps(schema, indent=2) + "\n"


def _find(name: str) -> Path:
    path, shipped = Path(name), shipped_recipes()
    if path.exists() or name.partition("/")[0] not in FOLDERS:
        return path
    if name.removesuffix(".yaml") not in shipped:
        raise RecipeError(str(unknown("the package", "recipe", name, list(shipped))))
    return shipped[name.removesuffix(".yaml")]


def _message(errors: ValidationError) -> str:
    """Format the first error as one line: key, value and expected input. Unknown keys are reported first."""
    error: Any = min(errors.errors(), key=lambda item: item["type"] != "unexpected_keyword_argument")
    *path, key = map(str, error["loc"] or [""])
    section = [part for part in path if part not in OBJECTIVES]
    name = ".".join(section) or "the recipe"
    if error["type"] == "value_error":  # raised in the __post_init__ of a section
        return ".".join([*section, key, str(error["ctx"]["error"])]).removeprefix(".")
    if error["type"] == "unexpected_keyword_argument":
        return str(unknown(name, "key", key, _keys(path)))
    if error["type"] == "union_tag_invalid":
        return str(unknown(key, "name", error["ctx"]["tag"], list(OBJECTIVES)))
    if error["type"] == "union_tag_not_found":
        return f"{key}={error['input']!r:.100}: give a mapping with the key 'name', one of {', '.join(OBJECTIVES)}"
    if error["type"] == "missing":
        return f"{name} lacks the key {key!r}, which has no default"
    expected = error["msg"][0].lower() + error["msg"][1:]
    if error["type"] in EXPECTED:
        expected = EXPECTED[error["type"]].format(**error.get("ctx", {}))
    return f"{'.'.join([*section, key]) or 'the recipe'}={error['input']!r:.100}: {expected}"


def _keys(section: Sequence[str]) -> list[str]:
    """Return the valid keys of a section, given by its path in the recipe."""
    kind: Any = Recipe
    for part in section:
        if part in OBJECTIVES:
            kind = OBJECTIVES[part]
        elif not part.isdecimal():
            kind = get_type_hints(kind)[part]
            kind = next((member for member in get_args(kind) if is_dataclass(member)), kind)
    return [field.name for field in fields(kind)]


def _change(content: Any, change: str) -> None:
    """Apply one `--set` change to the parsed YAML, in place."""
    key, equals, text = change.partition("=")
    if not equals or not all(key.split(".")):
        raise RecipeError(f"--set {change!r} is not key=value, as in train.learning_rate=1e-5")
    try:
        value = parse_yaml(text)
    except ValueError as error:
        raise RecipeError(f"--set {change!r} is {error}") from None
    *sections, last = key.split(".")
    for section in sections:
        if isinstance(content, dict) and content.get(section, "") in NULL:
            content[section] = {}
        content = content[_index(content, section, change)]
    content[_index(content, last, change)] = value


def _index(content: Any, part: str, change: str) -> str | int:
    """Return one part of a dotted key as a mapping key or a list index, depending on the container."""
    if isinstance(content, dict):
        return part
    if isinstance(content, list) and part.isdecimal() and int(part) < len(content):
        return int(part)
    allowed = f"an index from 0 to {len(content) - 1}" if isinstance(content, list) and content else "an existing key"
    raise RecipeError(f"--set {change!r}: there is no {part!r} in {content!r:.100}; use {allowed}")
