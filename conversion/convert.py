"""Converts a stock checkpoint to a crosshead model: resolve the request, fit, write, verify, publish."""

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from crosshead.common.access_tokens import without_tokens
from crosshead.common.errors import ConversionError, one_line
from crosshead.modeling.options import is_whole

from .architectures.families import FAMILIES, PREFIX, check_plain, family_of, read_config, stock_shapes
from .architectures.mixer_options import MixerRequest, read_mixers
from .architectures.mixer_tensors import mixed_shapes
from .calibration.calibrate import SUFFIX, Text, observe
from .calibration.calibration import Calibration, Observers
from .compress.budget_search import AutoLayers
from .compress.mix_layers import active_heads, component_pairs, mix_layers, needed_observations
from .plan import check_source, least_size, make_plan
from .sources.resolve import Source, open_source
from .verification.tolerances import Tolerance, starts_neutral, tolerance
from .verification.verify import verifier
from .writing.vocabulary import check_vocabulary
from .writing.writer import Fitted, Progress, Request, run, silent

MOST = 2**32 - 1
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True)
class Options:
    """What may be asked of a conversion beside its mechanisms."""

    revision: str | None = None
    vocab_size: int | None = None
    dtype: str | None = None
    calibration: str | Path | None = None
    save_calibration: str | Path | None = None
    layers: str | None = None
    budget: float | None = None
    seed: int = 0
    allow_inexact: bool = False

    def check(self) -> None:
        """`ConversionError` where a value cannot be, whatever the model."""
        if self.dtype not in (None, *DTYPES):
            raise ConversionError(f"--dtype {self.dtype!r} is not allowed: use one of {', '.join(DTYPES)}")
        if self.layers not in (None, "auto"):
            raise ConversionError(f"--layers {self.layers!r} is not allowed: use auto, or a mechanism's own `layers`")
        if (self.layers is None) != (self.budget is None):
            raise ConversionError("--layers auto and --budget go together: give both or neither")
        if self.budget is not None and not (isinstance(self.budget, int | float) and 0 < self.budget < 1):
            raise ConversionError(f"--budget {self.budget} is not allowed: use a part of the KV cache, such as 0.5")
        for name, value, least in (("vocab-size", self.vocab_size, 1), ("seed", self.seed, 0)):
            if value is not None and not (is_whole(value) and least <= value <= MOST):
                raise ConversionError(f"--{name} {value!r} is not allowed: use a whole number from {least} to {MOST}")
        saved = _path(self.save_calibration)
        if saved is not None and (saved.suffix != SUFFIX or not saved.parent.is_dir() or saved.is_dir()):
            raise ConversionError(
                f"--save-calibration {saved} is not allowed: name a {SUFFIX} file in an existing folder"
            )
        if saved is not None and not os.access(saved.parent, os.W_OK | os.X_OK):
            raise ConversionError(f"--save-calibration {saved} cannot be written: name a file in another folder")

    @property
    def stored_dtype(self) -> str | None:
        """The dtype in safetensors' spelling."""
        return DTYPES[self.dtype] if self.dtype else None

    def recorded(self) -> dict[str, Any]:
        """Those that were given, without anything of this machine."""
        paths = ("calibration", "save_calibration")
        given = {key: value for key, value in asdict(self).items() if value is not None and value is not False}
        return {key: value for key, value in given.items() if key not in paths}


def convert(
    source: str | Path,
    out: str | Path,
    mixers: Mapping[str, Any],
    *,
    overwrite: bool = False,
    restart: bool = False,
    verify: bool = True,
    progress: Progress = silent,
    **options: Any,
) -> dict[str, Any]:
    """Give a checkpoint mechanisms; returns the report, which the folder holds as `conversion.json`.

    `mixers` maps mechanisms to options, as in a config; a value may be text as on the command line. `overwrite`
    replaces a model in `out`. A run goes on from what an unfinished one of the same conversion has left there, unless
    `restart` discards it. `options` are the fields of `Options`.
    """
    asked = Options(**options)
    asked.check()
    with tempfile.TemporaryDirectory() as scratch:
        origin = open_source(source, asked.revision, scratch=Path(scratch))
        request = resolve(origin, mixers, asked)
        return run(request, Path(out), overwrite, restart, verifier(origin) if verify else None, progress)


@dataclass(frozen=True, kw_only=True)
class MechanismRequest(Request):
    """A conversion of a stock checkpoint to a model with mechanisms."""

    asked: Options
    stock: Any
    """The source's configuration."""
    target: Any
    """The target's configuration; `--layers auto` changes its mechanisms."""
    mixers: MixerRequest
    text: Text
    observers: Observers
    auto: AutoLayers | None
    dropped: Mapping[str, str]
    """Tensors of the source that are not written -> the reason."""

    def fit(self, keep: Callable[[str], Path], progress: Progress) -> Fitted:
        """Observe the source on a text where that is needed, choose layers, and plan every tensor."""
        config, mixers, observed, calibration = self.target, self.mixers, dict[str, Any](), None
        if self.observers.wanted:
            observed["calibration"] = self.text.described()
            calibration = self._calibrate(keep("calibration.safetensors"), progress)
        if self.auto is not None:
            mixers, observed["chosen"] = self.auto.resolve(calibration, keep("chosen.json"), progress)
            config = _target_config(self.source.config, self.stock, mixers, self.asked)
        store, shapes = self.source.store, mixed_shapes(config, stock_shapes(config))
        rewrites = mix_layers(store, config, shapes, mixers, calibration, self.asked.seed)
        plan = make_plan(store, shapes, self.dropped, rewrites.layers, self.asked.stored_dtype)
        return Fitted(config, plan, rewrites, observed)

    def _calibrate(self, path: Path, progress: Progress) -> Calibration:
        calibration = observe(self.source, self.stock, self.text, self.observers, path, progress)
        if self.asked.save_calibration is not None:
            _copy_whole(calibration.path, Path(self.asked.save_calibration))
        return calibration


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
    text = Text.of(_path(asked.calibration), origin)
    auto = None if asked.budget is None else AutoLayers(asked.budget, origin, stock, target, request, text)
    if auto is not None:
        auto.check()
    wanted = needed_observations(target, request, auto is not None)
    reads = bool(wanted) or auto is not None
    _check_calibration(asked, text, bool(wanted), reads)
    components = [] if auto is not None else component_pairs(target)
    biased = family_of(stock).qkv_bias(stock)
    observers = Observers(wanted, target.layouts(), active_heads(target), biased, components)
    _check_saved(_path(asked.save_calibration), observers)
    described = text.described() if reads else {}
    return MechanismRequest(
        command="convert",
        source=origin,
        options=asked.recorded() | {"mixers": target.mixers, "choices": request.choices, "calibration": described},
        least_bytes=least_size(origin.store, dropped, asked.stored_dtype),
        cached_bytes=0 if text.is_saved else observers.size,
        computes=reads or "explicit" in request.mixers,
        tolerance=_tolerance(origin, target, request, asked, bool(wanted)) if neutral else None,
        asked=asked,
        stock=stock,
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


def _path(given: str | Path | None) -> Path | None:
    return None if given is None else Path(given)
