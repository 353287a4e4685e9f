"""Converts a stock checkpoint to a crosshead model: resolve the request, calibrate and fit, plan; then write."""

import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from crosshead.common.access_tokens import without_tokens
from crosshead.common.errors import ConversionError, one_line
from crosshead.common.progress import Progress, silent
from crosshead.common.torch_state import default_torch_state

from .architectures.encoder_limits import RequestedConversion, check_limits
from .architectures.families import (
    FAMILIES,
    PREFIX,
    architecture_of,
    check_plain,
    encoder_only_fields,
    family_of,
    read_config,
    tensor_shapes,
    tied_tensors,
)
from .calibration.calibration import Calibration, Observers, observe
from .calibration.images import calibration_input
from .calibration.text import Text
from .compress.auto_layers import AutoLayers, check_auto
from .compress.convert_layers import (
    candidate_counts,
    choose_groups,
    convert_layers,
    layer_requests,
    needed_observations,
)
from .compress.initial_weights import doubled_heads
from .compress.joint_fit import fit_jointly, fits_jointly
from .mixers import MixerRequest, read_request
from .options import Options
from .plan import Plan, check_source, check_vocabulary, make_plan, minimum_size
from .sources.resolve import Source, open_source
from .stages import Request, run
from .verification.tolerances import ROUNDING, Tolerance, starts_neutral, tolerance


@default_torch_state()
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
    """Add mechanisms to a stock checkpoint and return the report, which is also written as `conversion.json`.

    `mixers` maps mechanisms to options, as in a config; a value may be a string as on the command line, and a key may
    name parts of a T5, as in "talking@encoder+cross". `overwrite` replaces a model in `out`. A run continues an
    unfinished run of the same conversion, unless `restart` discards it. With `plan_only` nothing is written, and the
    report is the plan. `options` are the fields of `Options`, plus `cache`: the fraction of the KV cache to keep, such
    as "50%". With `cache`, `budget` or `active`, `mixers` may be empty.
    """
    run_options = {"overwrite": overwrite, "restart": restart, "verify": verify, "plan_only": plan_only}
    checked = Options.of(options)
    if Path(out).suffix.lower() == ".gguf":
        raise ConversionError(f"{out} would be a folder: give another name; `crosshead fold` writes GGUF files")
    if not mixers:
        budgets = {"explicit": checked.budget, "mixture": checked.active}
        mixers = {name: {} for name, budget in budgets.items() if budget is not None}
    with tempfile.TemporaryDirectory() as scratch:
        request = resolve(open_source(source, checked.revision, scratch=Path(scratch)), mixers, checked)
        return run(request, Path(out), **run_options, progress=progress)


@dataclass(frozen=True, kw_only=True)
class MechanismRequest(Request):
    """A request to convert a stock checkpoint to a crosshead model."""

    user_options: Options
    """Validated options of the user."""
    target: Any
    """The target's config; with `auto`, the numbers of heads are chosen later."""
    mixers: MixerRequest
    text: Text
    observers: Observers
    auto: AutoLayers | None
    dropped: Mapping[str, str]
    """Source tensor that is not written -> reason."""
    calibration: Calibration | None = None
    decisions: Mapping[str, Any] = field(default_factory=dict)
    """Fields of conversion.json for the calibration input and the choices that depend on it."""

    def calibrate(self, cache: Path, progress: Progress, dry_run: bool) -> Self:
        """Record activation statistics of the source's heads on the calibration input; choose heads within budgets."""
        if dry_run and self.auto is None and not self.observers.chooses_groups:
            return self
        request = self
        if self.auto is not None or self.observers.kinds:
            request = replace(self, decisions={"calibration": self.text.described()})
        if self.observers.kinds:
            calibration = self._observe(self.observers, cache / "calibration.safetensors", progress)
            request = replace(request, calibration=calibration)
        statistics = request.calibration
        if self.auto is not None:
            request = request._chosen(*self.auto.resolve(statistics, cache, progress))
        elif statistics is not None and self.observers.chooses_groups:
            layers = layer_requests(self.target, self.mixers)
            request = request._chosen(*choose_groups(self.observers.candidates, layers, self.mixers, statistics))
        if dry_run:
            return request
        request = request._fit(cache, progress)
        if self.user_options.save_calibration is not None:  # after a choice, the statistics: they serve other budgets
            saved = request.calibration if self.auto is None else statistics
            _save_calibration(saved.path, self.user_options.save_calibration)  # type: ignore[union-attr]
        return request

    def _observe(
        self, observers: Observers, file: Path, progress: Progress, known: Calibration | None = None
    ) -> Calibration:
        return observe(self.source, self.source_config, self.text, observers, file, progress, known, self.device)

    def _chosen(self, mixers: MixerRequest, chosen: Mapping[str, Any]) -> Self:
        """Return the request with the chosen numbers of heads or groups."""
        target = _target_config(self.source.config, self.source_config, mixers, self.user_options)
        return replace(self, target=target, mixers=mixers, decisions={**self.decisions, "chosen": chosen})

    def _fit(self, cache: Path, progress: Progress) -> Self:
        """Return the request with a calibration that holds fitted tensors for its numbers of heads."""
        layers, calibration = layer_requests(self.target, self.mixers), self.calibration
        kinds = needed_observations(layers, chooses=False)
        if self.auto is not None and kinds:
            observers = replace(
                self.observers,
                kinds=kinds,
                candidates=[[layer.counts()] for layer in layers],
                routings=[layer.routing for layer in layers],
            )
            calibration = self._observe(observers, cache / "fitted.safetensors", progress, calibration)
        if calibration is None:
            return self
        run = (self.source, self.source_config, self.text, cache, progress, self.device)
        calibration, fitted = fit_jointly(layers, calibration, *run)
        return replace(self, calibration=calibration, decisions={**self.decisions, **fitted})

    def plan(self) -> Plan:
        """Return the plan: the target's config and an action for every tensor."""
        target, store = self.target, self.source.store
        shapes = tensor_shapes(target, store.entries)
        jointly = fits_jointly(layer_requests(target, self.mixers), self.source, self.text)
        rewrites = convert_layers(
            store, target, shapes, self.mixers, self.calibration, self.user_options.seed, jointly
        )
        return make_plan(store, target, shapes, self.dropped, rewrites, self.user_options.stored_dtype, self.decisions)


def resolve(source: Source, mixers: Mapping[str, Any], options: Options) -> MechanismRequest:
    """Validate the mechanisms and options for a source and return the request; runs no model and writes nothing."""
    stock = read_config(source.config, "stock", source.label)
    check_plain(source.config, source.label)
    dropped = check_source(source.store, tensor_shapes(stock, source.store.entries), tied_tensors(stock))
    mixer_request = read_request(mixers, _mixed_config(source.config, {"mixers": {}}))
    if not any(part.mixers for part in mixer_request.by_part) and options.vocab_size is None:
        raise ConversionError("no mechanism was given: name one with --mixer, such as --mixer knocking")
    device, chooses = options.device or "cpu", (options.budget, options.active) != (None, None)
    check_limits(RequestedConversion(stock, mixer_request, options))
    check_auto(mixer_request, options.budget, options.active)
    if options.active is not None:
        all_heads = mixer_request.mixers["mixture"] | {"active_heads": stock.num_attention_heads}
        mixer_request = replace(mixer_request, mixers=mixer_request.mixers | {"mixture": all_heads})
    target = _target_config(source.config, stock, mixer_request, options)
    is_neutral = starts_neutral(target, options.allow_inexact) and not chooses
    text = calibration_input(options.calibration, source)
    layers = layer_requests(target, mixer_request)
    kinds = needed_observations(layers, chooses=options.budget is not None)
    check_limits(RequestedConversion(stock, mixer_request, options, kinds))
    runs_source = bool(kinds) or chooses
    _check_calibration(options, text, bool(kinds), runs_source)
    auto = None
    if chooses:
        auto = AutoLayers(options.budget, options.active, source, stock, target, mixer_request, text, device)
        auto.check()
    observers = Observers(
        kinds,
        target.layouts(),
        [layer.active_heads for layer in layers],
        bool(family_of(stock).qkv_bias(stock)),
        [] if chooses else candidate_counts(layers, mixer_request),
        [layer.routing for layer in layers],
    )
    _check_saved(options.save_calibration, observers)
    described = text.described() if runs_source else {}
    recorded = target.mixers
    if observers.chooses_groups:
        explicit = {option: value for option, value in recorded["explicit"].items() if option != "groups"}
        recorded = recorded | {"explicit": explicit}
    return MechanismRequest(
        command="convert",
        source=source,
        source_config=stock,
        options=options.recorded() | {"mixers": recorded, "choices": mixer_request.choices, "calibration": described},
        minimum_bytes=minimum_size(stock, source.store, dropped, options.stored_dtype),
        cached_bytes=0 if text.is_saved else observers.cached_size(options.active is not None),
        computes=runs_source or not {"explicit", "bilinear"}.isdisjoint(target.mechanisms()),
        tolerance=_tolerance(source, target, options, bool(kinds)) if is_neutral else None,
        device=device,
        user_options=options,
        target=target,
        mixers=mixer_request,
        text=text,
        observers=observers,
        auto=auto,
        dropped=dropped,
    )


def _check_calibration(options: Options, text: Text, needs_statistics: bool, runs_source: bool) -> None:
    """Raise `ConversionError` if a calibration option has no effect, or a text is needed but a saved one is given."""
    for option, is_used in (("calibration", runs_source), ("save_calibration", needs_statistics)):
        if not is_used and getattr(options, option) is not None:
            name = option.replace("_", "-")
            raise ConversionError(f"--{name} has no effect: this conversion does not run the source on text; omit it")
    if text.is_saved and options.active is not None:
        raise ConversionError(
            f"--active fits routers to a text: name one instead of --calibration {options.calibration}"
        )
    if text.is_saved and not needs_statistics:
        raise ConversionError(
            f"--calibration {options.calibration} has no effect: --layers auto needs a text; name a text file"
        )


def _tolerance(source: Source, target: Any, options: Options, needs_statistics: bool) -> Tolerance:
    # `differential` scales the output projection, `bilinear` multiplies projections: both round weights once more.
    if not {"differential", "bilinear"}.isdisjoint(target.mechanisms()):
        rounded_to = {entry.dtype_in(options.stored_dtype) for entry in source.store.entries.values()} - {None}
        return tolerance(target, rounded_to & ROUNDING.keys())
    # Float32 rounding: reordered heads are summed in another order, `explicit` applies the key norm's scale later.
    rounded_to = {"F32"} if needs_statistics or "explicit" in target.mechanisms() else set()
    dtype = options.stored_dtype
    if dtype is not None and any(entry.dtype_in(dtype) != entry.dtype for entry in source.store.entries.values()):
        rounded_to.add(dtype)
    return tolerance(target, rounded_to)


def _mixed_config(content: Mapping[str, Any], changes: Mapping[str, Any]) -> Any:
    """Return a crosshead config: a source's config with changes; `ConversionError` if mechanisms do not fit it."""
    family = FAMILIES[content["model_type"]]
    try:
        config = family.crosshead.from_dict({**without_tokens(content)[0], **encoder_only_fields(content), **changes})
        config.architectures = [PREFIX.removesuffix("_").capitalize() + architecture_of(config)]
        return config
    except ValueError as error:
        message = one_line(error)
        for name, own_name in family.crosshead.attribute_map.items():
            message = re.sub(rf"^{name}=", f"{own_name}=", message)  # the name in the source's config.json
        raise ConversionError(message) from None


def _target_config(content: Mapping[str, Any], stock: Any, mixer_request: MixerRequest, options: Options) -> Any:
    changes: dict[str, Any] = {"mixers": mixer_request.mixers, **doubled_heads(mixer_request.mixers, stock)}
    if options.vocab_size is not None:
        check_vocabulary(options.vocab_size, stock.vocab_size)
        changes["vocab_size"] = options.vocab_size
    if options.dtype is not None:
        changes["dtype"] = options.dtype
    return _mixed_config(content, changes)


def _check_saved(path: Path | None, observers: Observers) -> None:
    """Refuse to overwrite a file that is not a calibration, such as a model's weights."""
    if path is None or not path.exists():
        return
    try:
        Calibration(path).check(observers)
    except ConversionError:
        raise ConversionError(
            f"--save-calibration {path} is not allowed: the file exists and is not a calibration for this conversion; "
            "name another file"
        ) from None


def _save_calibration(path: Path, target: Path) -> None:
    """Copy a calibration file atomically."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        partial.unlink(missing_ok=True)  # it may be a link to another file
        shutil.copyfile(path, partial)
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConversionError(
            f"--save-calibration {target} cannot be written ({error.strerror}): free some space, or use another folder"
        ) from error
