"""Converts a stock checkpoint to a crosshead model: resolve the request, calibrate and fit, plan; then write."""

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosshead.common.access_tokens import without_tokens
from crosshead.common.errors import ConversionError, one_line
from crosshead.common.progress import Progress, silent

from .architectures.families import FAMILIES, PREFIX, check_plain, family_of, read_config, stock_shapes
from .architectures.mixer_tensors import mixed_shapes
from .calibration.calibration import Calibration, Observers, observe
from .calibration.text import Text
from .compress.budget_search import AutoLayers
from .compress.mix_layers import active_heads, component_pairs, mix_layers, needed_observations
from .options import MixerRequest, Options, read_mixers
from .plan import Plan, check_source, least_size, make_plan
from .sources.resolve import Source, open_source
from .stages import Cached, Request, dry_run, run
from .verification.tolerances import Tolerance, starts_neutral, tolerance
from .writing.writer import check_vocabulary


def convert(
    source: str | Path,
    out: str | Path,
    mixers: Mapping[str, Any],
    *,
    overwrite: bool = False,
    restart: bool = False,
    verify: bool = True,
    plan_only: bool = False,
    progress: Progress = silent,
    **options: Any,
) -> dict[str, Any]:
    """Give a checkpoint mechanisms; returns the report, which the folder holds as `conversion.json`.

    `mixers` maps mechanisms to options, as in a config; a value may be text as on the command line. `overwrite`
    replaces a model in `out`. A run continues an unfinished one of the same conversion in `out`, unless `restart`
    discards its work. With `plan_only` nothing is written, and the report is the plan. `options` are the fields of
    `Options`.
    """
    asked = Options.of(options)
    with tempfile.TemporaryDirectory() as scratch:
        request = resolve(open_source(source, asked.revision, scratch=Path(scratch)), mixers, asked)
        if plan_only:
            return dry_run(request, Path(out), overwrite=overwrite, progress=progress)
        return run(request, Path(out), overwrite=overwrite, restart=restart, verify=verify, progress=progress)


@dataclass(frozen=True)
class Observed:
    """The result of running the source on text."""

    target: Any
    """The target's configuration, with the layers that were chosen."""
    mixers: MixerRequest
    calibration: Calibration | None
    decisions: Mapping[str, Any]
    """For the record: the text, and the choices that were made on it."""


@dataclass(frozen=True, kw_only=True)
class MechanismRequest(Request):
    """A conversion of a stock checkpoint to a model with mechanisms."""

    asked: Options
    target: Any
    """The target's configuration; `--layers auto` changes its mechanisms."""
    mixers: MixerRequest
    text: Text
    observers: Observers
    auto: AutoLayers | None
    dropped: Mapping[str, str]
    """Tensors of the source that are not written -> the reason."""

    def calibrate(self, cached: Cached, progress: Progress, dry_run: bool) -> Observed:
        """Record the source's attention heads on a text, and choose layers with `--layers auto`."""
        target, mixers, decisions, calibration = self.target, self.mixers, dict[str, Any](), None
        if self.observers.wanted and not (dry_run and self.auto is None):
            decisions["calibration"] = self.text.described()
            path = cached("calibration.safetensors")
            calibration = observe(self.source, self.source_config, self.text, self.observers, path, progress)
            if self.asked.save_calibration is not None and not dry_run:
                _copy_whole(calibration.path, self.asked.save_calibration)
        if self.auto is not None:
            mixers, decisions["chosen"] = self.auto.resolve(calibration, cached("chosen.json"), progress)
            target = _target_config(self.source.config, self.source_config, mixers, self.asked)
        return Observed(target, mixers, calibration, decisions)

    def plan(self, calibration: Observed) -> Plan:
        """Decide the action for every tensor."""
        target, store = calibration.target, self.source.store
        shapes = mixed_shapes(target, stock_shapes(target))
        rewrites = mix_layers(store, target, shapes, calibration.mixers, calibration.calibration, self.asked.seed)
        dtype = self.asked.stored_dtype
        return make_plan(store, target, shapes, self.dropped, rewrites, dtype, calibration.decisions)


def resolve(origin: Source, mixers: Mapping[str, Any], asked: Options) -> MechanismRequest:
    """Check the request: everything that can be refused before the source is run or anything is written."""
    stock = read_config(origin.config, "stock", origin.origin["name"])
    check_plain(origin.config, origin.origin["name"])
    dropped = check_source(origin.store, stock_shapes(stock), stock.tie_word_embeddings)
    request = read_mixers(mixers, _mixed_config(origin.config, {"mixers": {}}).layouts())
    if not request.mixers and asked.vocab_size is None:
        raise ConversionError("no mechanism is asked for: name one with --mixer, such as --mixer knocking")
    target = _target_config(origin.config, stock, request, asked)
    neutral = starts_neutral(target, asked.allow_inexact) and asked.budget is None
    text = Text.of(asked.calibration, origin)
    auto = None if asked.budget is None else AutoLayers(asked.budget, origin, stock, target, request, text)
    if auto is not None:
        auto.check()
    wanted = needed_observations(target, request, auto is not None)
    reads = bool(wanted) or auto is not None
    _check_calibration(asked, text, bool(wanted), reads)
    components = [] if auto is not None else component_pairs(target)
    biased = family_of(stock).qkv_bias(stock)
    observers = Observers(wanted, target.layouts(), active_heads(target), biased, components)
    _check_saved(asked.save_calibration, observers)
    described = text.described() if reads else {}
    return MechanismRequest(
        command="convert",
        source=origin,
        source_config=stock,
        options=asked.recorded() | {"mixers": target.mixers, "choices": request.choices, "calibration": described},
        least_bytes=least_size(origin.store, dropped, asked.stored_dtype),
        cached_bytes=0 if text.is_saved else observers.size,
        computes=reads or "explicit" in request.mixers,
        tolerance=_tolerance(origin, target, request, asked, bool(wanted)) if neutral else None,
        asked=asked,
        target=target,
        mixers=request,
        text=text,
        observers=observers,
        auto=auto,
        dropped=dropped,
    )


def _check_calibration(asked: Options, text: Text, observed: bool, reads: bool) -> None:
    """`ConversionError` where an option of calibration has no effect."""
    for option, used in (("calibration", reads), ("save_calibration", observed)):
        if not used and getattr(asked, option) is not None:
            name = option.replace("_", "-")
            raise ConversionError(f"--{name} has no use here: nothing in this conversion depends on text")
    if text.is_saved and not observed:
        raise ConversionError(
            f"--calibration {asked.calibration} has no use here: layers are chosen on a text; name a file of text"
        )


def _tolerance(origin: Source, target: Any, request: MixerRequest, asked: Options, observed: bool) -> Tolerance:
    # Heads in another order add up in another order, and normed keys are divided in another place.
    rounded_to, dtype = {"F32"} if observed or "explicit" in request.mixers else set(), asked.stored_dtype
    if dtype is not None and any(entry.dtype_in(dtype) != entry.dtype for entry in origin.store.entries.values()):
        rounded_to.add(dtype)
    return tolerance(target, rounded_to)


def _mixed_config(content: Mapping[str, Any], changes: Mapping[str, Any]) -> Any:
    """The target's configuration; `ConversionError` where the mechanisms cannot work in this model."""
    family = FAMILIES[content["model_type"]]
    architecture = PREFIX.removesuffix("_").capitalize() + family.architecture
    try:
        return family.mixed.from_dict({**without_tokens(content)[0], "architectures": [architecture], **changes})
    except ValueError as error:
        raise ConversionError(one_line(error)) from None


def _target_config(content: Mapping[str, Any], stock: Any, request: MixerRequest, asked: Options) -> Any:
    changes: dict[str, Any] = {"mixers": request.mixers}
    if asked.vocab_size is not None:
        check_vocabulary(asked.vocab_size, stock.vocab_size)
        changes["vocab_size"] = asked.vocab_size
    if asked.dtype is not None:
        changes["dtype"] = asked.dtype
    return _mixed_config(content, changes)


def _check_saved(path: Path | None, observers: Observers) -> None:
    """`ConversionError` where something else would be overwritten, such as the weights of a model."""
    if path is None or not path.exists():
        return
    try:
        Calibration(path).check(observers)
    except ConversionError:
        raise ConversionError(
            f"--save-calibration {path} is not allowed: it is there already and is no calibration for this "
            "conversion; name another file"
        ) from None


def _copy_whole(path: Path, target: Path) -> None:
    """Copy a file so that there is never half of one."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.copyfile(path, partial)
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConversionError(
            f"--save-calibration {target} cannot be written ({error.strerror}): make room, or name another folder"
        ) from error
