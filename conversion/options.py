"""What a user asks of a conversion: mechanisms and options, from the command line, a YAML recipe or Python.

Values may be text, as in `mixture:active_heads=75%` or `knocking:on=query+value`: the kind of each option says how
it is read. Options that only a conversion knows (`method`, `shared`) are kept apart from those a config stores.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from crosshead.common.errors import ConversionError
from crosshead.common.validation import explained
from crosshead.modeling.configuration import LAYERS
from crosshead.modeling.mechanisms import MECHANISMS, RULES
from crosshead.modeling.mechanisms.base import HeadLayout
from crosshead.modeling.options import Choice, Count, Flag, Integer, Layers, Number, Option, Subset, is_whole, unknown

CALIBRATION_SUFFIX = ".safetensors"
"""Of a saved calibration."""
LARGEST = 2**32 - 1
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""The dtypes of a conversion -> their names in safetensors."""
PATHS = ("calibration", "save_calibration")


class Options(BaseModel):
    """Options of a conversion apart from its mechanisms."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    revision: str | None = None
    vocab_size: Annotated[int, Field(ge=1, le=LARGEST)] | None = None
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    calibration: Path | None = None
    save_calibration: Path | None = None
    layers: Literal["auto"] | None = None
    budget: Annotated[float, Field(gt=0, lt=1)] | None = None
    seed: Annotated[int, Field(ge=0, le=LARGEST)] = 0
    allow_inexact: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any], where: str = "--") -> Self:
        """The checked options; `ConversionError` with one line, which begins with `where`."""
        try:
            return cls.model_validate(options)
        except ValidationError as error:
            raise ConversionError(explained(error, ["mixers", *cls.model_fields], where)) from None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.layers is None) != (self.budget is None):
            raise ValueError("--layers auto and --budget go together: give both or neither")
        saved = self.save_calibration
        if saved is not None and (saved.suffix != CALIBRATION_SUFFIX or not saved.parent.is_dir() or saved.is_dir()):
            raise ValueError(
                f"--save-calibration {saved} is not allowed: name a {CALIBRATION_SUFFIX} file in an existing folder"
            )
        if saved is not None and not os.access(saved.parent, os.W_OK | os.X_OK):
            raise ValueError(f"--save-calibration {saved} cannot be written: name a file in another folder")
        return self

    @property
    def stored_dtype(self) -> str | None:
        """The dtype in safetensors' spelling."""
        return DTYPES[self.dtype] if self.dtype else None

    def recorded(self) -> dict[str, Any]:
        """The options that were given, without paths of this machine."""
        given = self.model_dump(exclude=set(PATHS)).items()
        return {key: value for key, value in given if value is not None and value is not False}


ONLY_HERE: dict[str, dict[str, Choice]] = {
    "explicit": {"method": Choice(("aligned", "svd"))},
    "mixture": {"shared": Choice(("first", "calibrated"))},
}
"""Options of a conversion that no config stores."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "explicit": {"norm": False},
    "mixture": {"router": "query_norm", "gate": "binary"},
}
"""Where a pretrained model wants another default than a fresh one."""
Mixers = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class MixerRequest:
    """What was asked for."""

    mixers: Mixers
    """For the config."""
    choices: dict[str, dict[str, str]]
    """For the conversion: mechanism -> option -> value."""


def split_argument(argument: str) -> tuple[str, dict[str, str]]:
    """`NAME[:key=value,...]` as name and options."""
    name, _, rest = argument.partition(":")
    options: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise ConversionError(f"--mixer {argument!r}: {part!r} is not key=value; lists are joined by +, as in a+b")
        if key in options:
            raise ConversionError(f"--mixer {argument!r} gives {key!r} twice")
        options[key] = value
    return name, options


def read_mixers(asked: Mapping[str, Any], layouts: list[HeadLayout]) -> MixerRequest:
    """Typed values for every option; whether they suit the model, the config checks."""
    mixers: Mixers = {}
    choices: dict[str, dict[str, str]] = {}
    for name, options in asked.items():
        if name not in MECHANISMS:
            raise ConversionError(str(unknown("--mixer", "mechanism", name, list(MECHANISMS))))
        given = {} if options is None else options
        if not isinstance(given, Mapping):
            raise ConversionError(f"mixers.{name}={given!r} is not allowed: use a mapping of option to value")
        here = ONLY_HERE.get(name, {})
        choices[name] = {key: _choice(name, key, kind, given.get(key), len(layouts)) for key, kind in here.items()}
        kinds: dict[str, Option] = {**RULES[name].options, LAYERS: Layers()}
        for key in given:
            if key not in kinds and key not in here:
                raise ConversionError(str(unknown(f"mixers.{name}", "option", key, [*kinds, *here])))
        values = {key: _typed(name, key, kinds[key], given[key], layouts) for key in given if key in kinds}
        mixers[name] = DEFAULTS.get(name, {}) | values
    if "mixture" in mixers:
        _share_half(mixers["mixture"], layouts[0].query_heads)
    return MixerRequest(mixers, choices)


def _share_half(options: dict[str, Any], heads: int) -> None:
    """The paper's continued training shares half of all heads; layers with fewer active heads share half of those."""
    active, half = options.get("active_heads"), heads // 2
    counts: list[Any] = active if isinstance(active, list) else [active]
    if "shared_heads" in options or not all(is_whole(count) and count > 0 for count in counts):
        return  # the config refuses a wrong count by its own name
    if max(counts, default=0) > half:
        shared = [half if count > half else count // 2 for count in counts]
        options["shared_heads"] = shared if isinstance(active, list) else shared[0]


def _choice(name: str, key: str, kind: Choice, value: Any, layers: int) -> str:
    try:
        return kind.parse(f"mixers.{name}.{key}", value, layers)
    except ValueError as error:
        raise ConversionError(str(error)) from None


def _typed(name: str, key: str, kind: Option, value: Any, layouts: list[HeadLayout]) -> Any:
    """Text as the kind of option it stands for; anything else as it is."""
    if isinstance(kind, Count):
        return _counts(f"mixers.{name}.{key}", value, _whole(name, key, layouts[0]))
    if isinstance(kind, Layers | Subset):
        parts = value.split("+") if isinstance(value, str) else value
        return [_number(part) for part in parts] if isinstance(kind, Layers) and isinstance(parts, list) else parts
    if not isinstance(value, str):
        return value
    if isinstance(kind, Flag):
        return {"true": True, "false": False}.get(value.lower(), value)
    return _number(value) if isinstance(kind, Integer | Number) else value


def _number(text: Any) -> Any:
    """Text as an int or a float where it is one."""
    for read in (int, float) if isinstance(text, str) else ():
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _whole(name: str, key: str, layout: HeadLayout) -> int:
    """What a percentage of heads is a percentage of."""
    return layout.query_heads if name == "mixture" else layout.key_value_heads


def _counts(name: str, value: Any, whole: int) -> Any:
    """Counts as numbers: one or a list, each a number or a percentage."""
    if isinstance(value, str) and "+" in value:
        value = value.split("+")
    if isinstance(value, list | tuple):
        return [_counts(name, part, whole) for part in value]
    if not (isinstance(value, str) and value.endswith("%")):
        return _number(value)
    share = _number(value[:-1])
    if not isinstance(share, int | float) or not 0 <= share <= 100:
        raise ConversionError(f"{name}={value!r} is not allowed: a percentage goes from 0% to 100%")
    return max(round(whole * share / 100), 1 if share else 0)


def with_recipe(
    recipe: Path | None, arguments: Sequence[str], given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Mixers and options: what the command line gives, else what the recipe says.

    Mechanisms on the command line replace the recipe's as a whole.
    """
    content = {} if recipe is None else read_recipe(recipe)
    mixers = content.pop("mixers", {})
    named = [split_argument(argument) for argument in arguments]
    for index, (name, _) in enumerate(named):
        if name in dict(named[:index]):
            raise ConversionError(f"--mixer {name} is given twice: join its options, as in {name}:a=1,b=2")
    chosen = {key: value for key, value in given.items() if value is not None and value is not False}
    return dict(named) or mixers, content | chosen


class _Loader(yaml.BaseLoader):  # type: ignore[misc]  # yaml brings no types
    """Every scalar stays text, as YAML 1.1 would read the key `on` as true; and no key stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping; the base class would let the last value of a key win."""
        content = super().construct_mapping(node, deep)
        if len(content) < len(node.value):
            raise yaml.constructor.ConstructorError(None, None, "a key stands twice", node.start_mark)
        return content


def read_recipe(path: Path) -> dict[str, Any]:
    """The mixers and options of a recipe; its relative paths start at the folder of the file."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConversionError(f"--recipe {path} cannot be read: {error}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ConversionError(f"--recipe {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConversionError(f"--recipe {path} holds no options: use `mixers:` and options, one a line")
    mixers = content.pop("mixers", None) or {}
    if not isinstance(mixers, dict):
        raise ConversionError(f"--recipe {path}: mixers={mixers!r} is not a mapping of mechanism to options")
    content |= {key: path.parent / content[key] for key in PATHS if isinstance(content.get(key), str)}
    options = Options.of(content, f"--recipe {path}: ").model_dump(exclude_unset=True)
    return options | ({"mixers": {name: chosen or {} for name, chosen in mixers.items()}} if mixers else {})
