"""Atomic output: the target is absent, or as it was, until its new content is complete.

Everything is written into `.<name>.crosshead-partial` beside the target, or into `.crosshead-partial` inside it where
it is a mount point or nothing can be written beside it. That folder holds

    lock           held while a run is at work: a second run for the same target is refused
    journal.json   which conversion this is, and the digests of the weight files that are finished
    model/         what becomes the target
    beside/        files that go beside the target when it is there
    publish.json   there while files are moved into a target that exists: the old model's files, to be removed

and what a run asks to keep for the next one. In the end `model/` is renamed; where the target is a folder, its files
are moved in, config.json last, and files that are not the old model's stay. A run that fails, is stopped or is killed
leaves what is finished. The next run of the same conversion goes on from the files that still are what the journal
says; another conversion is refused, unless it is told to restart. Moving in that was interrupted is finished by the
next run. Nothing is forced to the disk: a power cut can still lose what the system has not written out yet, as it can
after `cp`.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from crosshead.common.errors import ConversionError

from ..sources.model_folder import CONFIG
from ..sources.resolve import TEMPLATES
from ..sources.tensor_store import Entry
from .model_files import model_files
from .shard_writer import is_intact, shard_size
from .work_folder import SUFFIX, locked, move, parents_of, remove, work_folder

Digests = dict[str, str]
Identity = Mapping[str, Any]
"""What decides the bytes of a conversion, as JSON."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_CONTENT = {SUFFIX, "lost+found"}
"""What an empty folder may hold: the work of a run, and what the system puts onto a disk."""
_UNFINISHED = (".partial", ".draft")


class Staging:
    """A model folder in the making."""

    def __init__(self, target: Path, identity: Identity, overwrite: bool) -> None:
        self.work = work_folder(target)
        self.folder = self.work / "model"
        """Where to write."""
        self.finished: dict[str, Digests] = {}
        """Weight files that need not be written again -> the digests of their tensors."""
        self.unverified = False
        """Set while the complete model is verified."""
        self._target, self._identity, self._overwrite = target, dict(identity), overwrite
        self._journal, self._publishing = self.work / "journal.json", self.work / "publish.json"
        self._beside = self.work / "beside"
        self._total = 0

    def recover(self) -> None:
        """Finish what a run that published left undone or behind, be it this one or one that was killed."""
        publishing = self._publishing.exists()
        if publishing:
            self._move_in(json.loads(self._publishing.read_bytes()))
        if publishing or not self.folder.exists():
            for path in self._beside.glob("*"):
                path.replace(self._target.parent / path.name)
            self.discard()

    def begin(self, restart: bool) -> None:
        """Take up what an earlier run of the same conversion left; refuse to lose the work of another one."""
        identity, self.finished = self._read_journal()
        differ = [key for key in identity | self._identity if identity.get(key) != self._identity.get(key)]
        if differ and identity and not restart and self._holds_work():
            raise ConversionError(
                f"{self.work} holds unfinished work of another conversion, with other {' and '.join(differ)}: run "
                "that one again, or discard its work with --restart"
            )
        if differ or restart:
            self.discard()
            self.finished = {}
            self._write_journal()
        self.folder.mkdir(exist_ok=True)

    def keep(self, name: str) -> Path:
        """Where to put a file that is not published, for a run that goes on where this one stops."""
        return self.work / name

    def beside(self, name: str) -> Path:
        """Where to write a file that goes beside the target."""
        self._beside.mkdir(exist_ok=True)
        return self._beside / name

    def check_room(self, least: int, kept: int) -> None:
        """`ConversionError` where the disk has not even `least` bytes for the target and `kept` for what is kept.

        Those that an earlier run has written count.
        """
        places = self.folder.glob("*.safetensors"), self.work.glob("*.safetensors*")
        there = [sum(path.stat().st_size for path in place) for place in places]
        self._check_room(max(least - there[0], 0) + max(kept - there[1], 0))

    def expect(self, shards: Mapping[str, Sequence[Entry]]) -> None:
        """Say which weight files will be written: finds the finished ones, drops all else, and checks the disk."""
        intact = {}
        for path in self.folder.iterdir():
            digests, entries = self.finished.get(path.name), shards.get(path.name)
            if digests and entries and is_intact(path, entries, digests):
                intact[path.name] = digests
            else:
                remove(path)
        self.finished = intact  # only now: a run that is stopped meanwhile removes all others
        self._write_journal()
        sizes = {file: shard_size(entries) for file, entries in shards.items()}
        self._total = sum(sizes.values())
        self._check_room(self._total - sum(sizes[file] for file in self.finished))

    def _check_room(self, needed: int) -> None:
        free = shutil.disk_usage(self.work).free
        if needed > free:
            raise ConversionError(
                f"{self._target} needs {_size(needed)}, its disk has {_size(free)} free: make room or write elsewhere"
            )

    def record(self, file: str, digests: Digests) -> None:
        """Note that a weight file is finished."""
        self.finished[file] = digests
        self._write_journal()

    def publish(self) -> list[str]:
        """Put the finished model in the target's place; the names of files there that are no part of a model."""
        check_target(self._target, self._overwrite)
        others: list[str] = []
        if self._target.is_dir():
            old, new = model_files(self._target), {path.name for path in self.folder.iterdir()}
            others = sorted(set(os.listdir(self._target)) - old - new - _NO_CONTENT)
            _write_json(self._publishing, sorted(old - new))
        else:
            self.folder.rename(self._target)
        self.recover()
        return others

    def _move_in(self, old: Sequence[str]) -> None:
        """Replace the old model's files. Without config.json it is no model, so that no mixture of both is one."""
        config = self.folder / CONFIG
        if not config.exists():  # a run that was interrupted later has moved it
            return
        (self._target / CONFIG).unlink(missing_ok=True)
        for path in sorted(self.folder.iterdir()):
            if path != config:
                move(path, self._target / path.name)
        for name in old:
            if os.path.lexists(self._target / name):
                remove(self._target / name)
        move(config, self._target / CONFIG)

    def discard(self) -> None:
        """Remove everything but the lock; first what would go beside a model that will not be there."""
        order = {self._beside: 0, self._publishing: 2}
        for path in sorted(self.work.iterdir(), key=lambda path: order.get(path, 1)):
            if path.name != "lock":
                remove(path)

    def stop(self, error: BaseException) -> None:
        """Keep what is finished, and add to the error where it is and how to go on."""
        if self._publishing.exists() or not self.folder.exists():  # `recover` goes on, or must not find this otherwise
            error.add_note(f"the next run for {self._target} moves the rest of the model there from {self.work}")
            return
        if not self._holds_work():
            self.discard()
            return
        for path in [*self.folder.glob("*.safetensors"), *self.work.glob("*.partial")]:
            if path.name not in self.finished:
                remove(path)
        if self.unverified:
            error.add_note(
                f"the model is kept, not verified, in {self.folder}: the same command verifies it again, --no-verify "
                "takes it as it is, and --restart writes it again"
            )
        else:
            error.add_note(
                f"what was finished is kept in {self.work}: the same command goes on from there; to discard it, add "
                "--restart or remove that folder"
            )

    def _holds_work(self) -> bool:
        """Whether there is anything that a later run could use."""
        known = {"lock", self._journal.name, self._publishing.name, self.folder.name, self._beside.name}
        kept = [path for path in self.work.iterdir() if path.name not in known and path.suffix not in _UNFINISHED]
        return bool(kept) or any((self.folder / file).exists() for file in self.finished)

    def failure(self, error: OSError) -> ConversionError:
        """The line for an error of the file system while the folder was written."""
        if error.errno not in _FULL:
            return ConversionError(f"{self._target} cannot be written: {error}")
        written = sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))
        progress = f"{_size(written)} of {_size(self._total)}"
        return ConversionError(f"{self._target} cannot be written: the disk was full after {progress}; make room")

    def _read_journal(self) -> tuple[dict[str, Any], dict[str, Digests]]:
        """The identity of the conversion that wrote here, and its finished files; empty where there is no journal."""
        try:
            content = json.loads(self._journal.read_bytes())
            return dict(content["identity"]), dict(content["finished"])
        except (FileNotFoundError, ValueError, LookupError, TypeError):  # a power cut may leave half a file
            return {}, {}

    def _write_journal(self) -> None:
        _write_json(self._journal, {"identity": self._identity, "finished": self.finished})


@contextmanager
def staging(target: Path, identity: Identity, overwrite: bool, restart: bool = False) -> Iterator[Staging]:
    """Write a folder so that `target` is never half of one; `identity` is equal for runs that write the same bytes.

    The block writes into `folder` and calls `publish`; its end without `publish` leaves nothing. An error in it leaves
    what is finished, for the next run with this identity; `restart` discards what is there.
    """
    target = Path(os.path.abspath(target))
    stage = Staging(target, identity, overwrite)
    try:
        with parents_of(target), locked(stage.work, target):
            stage.recover()
            check_target(target, overwrite)
            stage.begin(restart)
            try:
                yield stage
                stage.discard()
            except OSError as error:
                failure = stage.failure(error)
                stage.stop(failure)
                raise failure from error
            except BaseException as error:
                stage.stop(error)
                raise
    except OSError as error:
        raise ConversionError(f"{target} cannot be written: {error}") from error


def check_target(target: Path, overwrite: bool) -> None:
    """Refuse to replace what is there, but for an empty folder and, where told to, a model."""
    if not os.path.lexists(target):
        return
    is_folder = target.is_dir() and not target.is_symlink()
    names = sorted(set(os.listdir(target)) - _NO_CONTENT) if is_folder else []
    if not overwrite and (names or not is_folder):
        raise ConversionError(f"{target} is already there: choose another place, or replace it with --overwrite")
    if not is_folder:
        raise ConversionError(f"{target} is not a folder of its own: it is not overwritten, choose another place")
    if fault := _no_model(target, names):
        raise ConversionError(f"{target} {fault}: it is not overwritten, choose another place")
    if not os.access(target, os.W_OK | os.X_OK):
        raise ConversionError(f"{target} cannot be written: make it writable, or choose another place")


def _no_model(folder: Path, names: Sequence[str]) -> str | None:
    """Why a folder with this content is not overwritten; None where it holds a model, or nothing."""
    folders = [name for name in names if name != TEMPLATES and (folder / name).is_dir()]
    if folders:  # checkpoints of a training run, a repository, somebody's home
        return f"holds the folder {folders[0]!r}, which is no part of a model"
    if names and CONFIG not in names:
        return f"holds no {CONFIG}, so no model"
    if names and not any(name.endswith(".safetensors") for name in names):
        return "holds no safetensors, so no model"
    return None


def check_apart(source: Path, target: Path) -> None:
    """Refuse a target that is the source, or lies inside it or around it."""
    origin, place = source.resolve(), Path(os.path.abspath(target)).resolve()  # `..` goes as in `staging`
    if origin == place or origin in place.parents or place in origin.parents:
        raise ConversionError(f"{target} and the source {source} are not apart: write to a folder outside the source")


def _write_json(path: Path, content: Any) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(content), encoding="utf-8")
    draft.replace(path)


def _size(count: int) -> str:
    return f"{count / 1e9:.3f} GB"
