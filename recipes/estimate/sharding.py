"""How accelerate divides a run among GPUs, read from the file that `accelerate launch --config_file` is given."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from crosshead.common.errors import RecipeError, one_line
from crosshead.modeling.options import is_whole

FOLDER = Path(__file__).parents[1] / "accelerate"
"""Where the shipped files lie."""
ALONE, COPIES, FSDP, ZERO3 = "one GPU", "a copy on each GPU", "FSDP2", "DeepSpeed ZeRO-3"
KINDS = {"NO": ALONE, "MULTI_GPU": COPIES, "FSDP": FSDP, "DEEPSPEED": ZERO3}
"""Accelerate's `distributed_type` -> what it does."""
COUNTED_ON: dict[str, tuple[str, dict[str, tuple[Any, Any]]]] = {
    FSDP: (
        "fsdp_config",
        {
            "fsdp_version": (2, 1),
            "fsdp_reshard_after_forward": (True, True),
            "fsdp_offload_params": (False, False),
        },
    ),
    ZERO3: (
        "deepspeed_config",
        {
            "zero_stage": (3, 2),
            "offload_optimizer_device": ("none", "none"),
            "offload_param_device": ("none", "none"),
            "deepspeed_config_file": (None, None),
        },
    ),
}
"""By kind, a section of the file and, by key, the value that memory is counted for, and what accelerate takes if none
is given."""


@dataclass(frozen=True)
class Sharding:
    """Who holds what."""

    name: str
    kind: str
    processes: int


ONE_GPU = Sharding("one_gpu", ALONE, 1)


def read_sharding(name: str) -> Sharding:
    """From an accelerate configuration file, or a shipped one by its name, as `fsdp2_8_gpus`."""
    shipped = FOLDER / f"{name.removesuffix('.yaml')}.yaml"
    path = Path(name)
    path = shipped if shipped.is_file() and not path.exists() else path
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        known = ", ".join(sorted(file.stem for file in FOLDER.glob("*.yaml")))
        raise RecipeError(f"--accelerate {name} cannot be read: {one_line(error)}; shipped are {known}") from None
    if not isinstance(content, dict):
        raise RecipeError(f"--accelerate {name} is no configuration of accelerate: make one with `accelerate config`")
    kind = KINDS.get(str(content.get("distributed_type")))
    if kind is None:
        raise RecipeError(
            f"--accelerate {name}: distributed_type={content.get('distributed_type')!r} is not counted: "
            f"use one of {', '.join(KINDS)}"
        )
    _check(name, kind, content)
    processes: Any = 1 if kind == ALONE else content.get("num_processes")
    if not is_whole(processes) or processes < 1:
        raise RecipeError(f"--accelerate {name}: num_processes={processes!r} does not say how many GPUs there are")
    return Sharding(path.stem, kind, processes)


def check_teacher(kind: str | None) -> None:
    """`RecipeError` where a teacher beside the model cannot be, as nothing would put its weights together."""
    if kind == ZERO3:
        raise RecipeError(
            f"distillation.teacher is not for {ZERO3}, which would take it apart: use distillation.logits, made "
            "before the run, or FSDP2"
        )


def _check(name: str, kind: str, content: dict[str, Any]) -> None:
    section, settings = COUNTED_ON.get(kind, ("", {}))
    found = content.get(section) or {}
    if not isinstance(found, dict):
        raise RecipeError(f"--accelerate {name}: {section}={found!r} is no mapping, one `key: value` a line")
    for key, (counted, if_none) in settings.items():
        value = found.get(key, if_none)
        if value != counted:
            raise RecipeError(
                f"--accelerate {name}: {section}.{key}={value!r} is not counted: only {counted!r} is, so use that or "
                "try the run itself"
            )
