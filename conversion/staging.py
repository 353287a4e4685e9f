"""Never half a model: a target folder is absent, or as it was, until it is complete.

Everything is written into `.<name>.crosshead-partial` beside the target, which holds

    lock           held while a run is at work: a second run for the same target is refused
    journal.json   which conversion this is, and the digests of the weight files that are finished
    model/         what becomes the target
    beside/        files that go beside the target when it is there

and what a run asks to keep for the next one. In the end `model/` is renamed. An error takes the whole folder away. A
kill or Ctrl-C leaves it: the next run of the same conversion goes on from the files that still are what the journal
says, and any other conversion starts afresh. A target that is replaced waits as `.<name>.crosshead-replaced` between
the two renames; the next run puts it back if need be. Nothing is forced to the disk: a power cut can still lose what
the system has not written out yet, as it can after `cp`.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from .errors import ConversionError
from .shard_writer import is_intact, shard_size
from .sources import CONFIG, TEMPLATES
from .store import Entry
from .work_folder import locked, parents_of

Digests = dict[str, str]
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Staging:
    """A model folder in the making."""

    def __init__(self, target: Path, identity: str, overwrite: bool) -> None:
        self.work = target.parent / f".{target.name}.crosshead-partial"
        self.folder = self.work / "model"
        """Where to write."""
        self.finished: dict[str, Digests] = {}
        """Weight files that need not be written again -> the digests of their tensors."""
        self._target, self._identity, self._overwrite = target, identity, overwrite
        self._replaced = target.parent / f".{target.name}.crosshead-replaced"
        self._journal = self.work / "journal.json"
        self._beside = self.work / "beside"
        self._total = 0

    def recover(self) -> None:
        """Finish what a run that published left undone or behind, be it this one or one that was killed."""
        if self._replaced.exists():
            if self._target.exists():
                shutil.rmtree(self._replaced)
            else:
                self._replaced.rename(self._target)
        if not self.folder.exists():
            for path in self._beside.glob("*"):
                path.replace(self._target.parent / path.name)
            self.discard()

    def begin(self) -> None:
        """Take up what an earlier run of the same conversion left; remove what another one did."""
        if self._read_journal() is None:
            self.discard()
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
        earlier = self._read_journal() or {}
        for path in self.folder.iterdir():
            digests, entries = earlier.get(path.name), shards.get(path.name)
            if digests and entries and is_intact(path, entries, digests):
                self.finished[path.name] = digests
            else:
                _remove(path)
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

    def publish(self) -> None:
        """Put the finished folder in the target's place."""
        check_target(self._target, self._overwrite)
        try:
            if self._target.exists():
                self._target.rename(self._replaced)
            self.folder.rename(self._target)
        finally:
            self.recover()

    def discard(self) -> None:
        """Remove everything but the lock; first what would go beside a model that will not be there."""
        for path in sorted(self.work.iterdir(), key=lambda path: path != self._beside):
            if path.name != "lock":
                _remove(path)

    def failure(self, error: OSError) -> ConversionError:
        """The line for an error of the file system while the folder was written."""
        if error.errno not in _FULL:
            return ConversionError(f"{self._target} cannot be written: {error}")
        written = sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))
        progress = f"{_size(written)} of {_size(self._total)}"
        return ConversionError(f"{self._target} cannot be written: the disk was full after {progress}; make room")

    def _read_journal(self) -> dict[str, Digests] | None:
        """The finished files; None where there is no journal of this conversion."""
        try:
            content = json.loads(self._journal.read_bytes())
        except (FileNotFoundError, ValueError):  # a power cut may leave half a file
            return None
        return content["finished"] if content["identity"] == self._identity else None

    def _write_journal(self) -> None:
        draft = self._journal.with_suffix(".draft")
        draft.write_text(json.dumps({"identity": self._identity, "finished": self.finished}), encoding="utf-8")
        draft.replace(self._journal)


@contextmanager
def staging(target: Path, identity: str, overwrite: bool) -> Iterator[Staging]:
    """Write a folder so that `target` is never half of one; `identity` is equal for runs that write the same bytes.

    The block writes into `folder` and calls `publish`. An error in it, or its end without `publish`, leaves nothing.
    """
    target = Path(os.path.abspath(target))
    stage = Staging(target, identity, overwrite)
    try:
        with parents_of(target), locked(stage.work, target):
            stage.recover()
            check_target(target, overwrite)
            try:
                stage.begin()
                yield stage
                stage.discard()
            except OSError as error:
                failure = stage.failure(error)
                stage.discard()
                raise failure from error
            except Exception:
                stage.discard()
                raise
    except OSError as error:
        raise ConversionError(f"{target} cannot be written: {error}") from error


def check_target(target: Path, overwrite: bool) -> None:
    """Refuse to replace what is there, unless told to, and then only an empty folder or a model."""
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise ConversionError(f"{target} is already there: choose another place, or replace it with --overwrite")
    if target.is_symlink() or not target.is_dir():
        raise ConversionError(f"{target} is not a folder of its own: it is not overwritten, choose another place")
    if fault := _no_model(target):
        raise ConversionError(f"{target} {fault}: it is not overwritten, choose another place")


def _no_model(folder: Path) -> str | None:
    """What there would be lost with a folder that is not a model alone; None where it is one, or empty."""
    names = sorted(path.name for path in folder.iterdir())
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


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _size(count: int) -> str:
    return f"{count / 1e9:.3f} GB"
