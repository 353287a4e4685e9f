"""Atomic output: the target directory is replaced only after the model is fully written.

Everything is written into the working directory `.<name>.crosshead-partial` next to the target, or into
`.crosshead-partial` inside the target if that is a mount point or its parent is not writable. It contains

    lock           locked during a run: a second run for the same target is refused
    journal.json   the fingerprint of the conversion, and the digests of the finished weight files
    model/         the new content of the target
    siblings/      files that are moved next to the target, after the model
    publish.json   present while files are moved into an existing target: the old model's files, to be removed

and files that a run caches for the next run. At the end `model/` is renamed to the target. If the target is an
existing folder, the files are moved into it, config.json last, and files that are not part of the old model stay. A
run that fails or is killed leaves its finished files. The next run of the same conversion uses those that still match
the journal; another conversion is refused without `restart`. The next run also finishes an interrupted move. Nothing
is flushed to the disk: a power failure can lose data, as after `cp`.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from crosshead.common.errors import ConversionError
from crosshead.common.file_bytes import byte_size

from ..sources.model_folder import CONFIG, FOLDERS, RECORD, model_files, write_json
from ..sources.tensor_store import Entry
from .shard_writer import is_intact, shard_size
from .work_folder import SUFFIX, locked, move, parents_of, remove, work_folder

Digests = dict[str, str]
"""Tensor name -> CRC-32."""
Fingerprint = Mapping[str, Any]
"""JSON object that is equal for runs that write the same bytes."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error codes of a full disk and of an exceeded quota."""
_IGNORED = {SUFFIX, "lost+found"}
"""Names that an empty folder may contain: the working directory, and a folder that file systems create."""


class AtomicOutput:
    """A model folder that is being written."""

    def __init__(self, target: Path, fingerprint: Fingerprint, overwrite: bool) -> None:
        self.work = work_folder(target)
        """The working directory. Files in it are not published; the next run of the same conversion finds them."""
        self.folder = self.work / "model"
        """The folder to which the model is written."""
        self.finished: dict[str, Digests] = {}
        """File name of a finished weight file -> the CRC-32 of its tensors."""
        self._target, self._fingerprint, self._overwrite = target, dict(fingerprint), overwrite
        self._journal, self._publishing = self.work / "journal.json", self.work / "publish.json"
        self._siblings = self.work / "siblings"
        self._total = 0

    def recover(self) -> None:
        """Finish moving files to the target, in this run or after a killed one, and remove the remaining files."""
        publishing = self._publishing.exists()
        old = json.loads(self._publishing.read_bytes()) if publishing else []
        self._check_names(old)
        if publishing:
            self._move_in(old)
        if publishing or not self.folder.exists():
            for path in self._siblings.glob("*"):
                path.replace(self._target.parent / path.name)
            self.discard()

    def begin(self, restart: bool) -> None:
        """Continue an earlier run of the same conversion; refuse to discard the files of another one."""
        earlier, self.finished = self._read_journal()
        differ = [key for key in earlier | self._fingerprint if earlier.get(key) != self._fingerprint.get(key)]
        if differ and earlier and not restart and self._has_reusable_files():
            raise ConversionError(
                f"{self.work} contains an unfinished conversion with other {' and '.join(differ)}: run that one "
                "again, or discard it with --restart"
            )
        try:
            if differ or restart:
                self.discard()
                self.finished = {}
                self._write_journal()
            self.folder.mkdir(exist_ok=True)
        except BaseException:
            if not self._has_reusable_files():
                self.discard()
            raise

    def sibling(self, name: str) -> Path:
        """Return the path to which to write a file that is published next to the target."""
        self._siblings.mkdir(exist_ok=True)
        return self._siblings / name

    def check_space(self, minimum: int, cached: int) -> None:
        """Raise `ConversionError` if the disk lacks `minimum` bytes for the target and `cached` for cached files.

        Files of an earlier run count as already written.
        """
        files = self.folder.glob("*.safetensors"), self.work.glob("*.safetensors*")
        written, written_cached = [sum(path.stat().st_size for path in paths) for paths in files]
        check_free(self.work, self._target, max(minimum - written, 0) + max(cached - written_cached, 0))

    def expect(self, shards: Mapping[str, Sequence[Entry]]) -> None:
        """Declare the weight files: keep the intact ones, remove all other files, and check the free space."""
        intact = {}
        for path in self.folder.iterdir():
            digests, entries = self.finished.get(path.name), shards.get(path.name)
            if digests and entries and is_intact(path, entries, digests):
                intact[path.name] = digests
            else:
                remove(path)
        self.finished = intact  # after the loop: if it is interrupted, files that are not in `finished` are removed
        self._write_journal()
        sizes = {file: shard_size(entries) for file, entries in shards.items()}
        self._total = sum(sizes.values())
        check_free(self.work, self._target, self._total - sum(sizes[file] for file in self.finished))

    def record(self, file: str, digests: Digests) -> None:
        """Add a finished weight file to the journal."""
        self.finished[file] = digests
        self._write_journal()

    def publish(self) -> list[str]:
        """Move the complete model to the target; return the names of files there that are not part of a model."""
        check_target(self._target, self._overwrite)
        others: list[str] = []
        if self._target.is_dir():
            old, new = model_files(self._target), {path.name for path in self.folder.iterdir()}
            others = sorted(set(os.listdir(self._target)) - old - new - _IGNORED)
            write_json(self._publishing, sorted(old - new))
        else:
            self.folder.rename(self._target)
        self.recover()
        return others

    def _check_names(self, old: Any) -> None:
        """Refuse a working directory of another origin: moving it could remove folders, or files elsewhere."""
        new = [path.name for path in self.folder.glob("*")] if self._publishing.exists() else []
        names = [*old, *new] if isinstance(old, list) else [None]
        folders = {path.name for place in (self.folder, self._target) for path in place.glob("*") if path.is_dir()}
        strange = [name for name in names if not _is_plain(name) or name in folders - FOLDERS.keys()]
        strange += [path.name for path in (self.work, self.folder, self._siblings) if path.is_symlink()]
        strange += [path.name for path in self._siblings.glob("*") if path.name != f"{self._target.name}.{RECORD}"]
        if strange:
            raise ConversionError(
                f"{self.work} was not written by crosshead, since it names {strange[0]!r}: check it, and remove it"
            )

    def _move_in(self, old: Sequence[str]) -> None:
        """Move the model in and remove the files `old`; config.json moves last, so that no mixture can be loaded."""
        config = self.folder / CONFIG
        if not config.exists():  # moved by a run that was interrupted later
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
        """Remove all files but the lock: siblings first, publish.json last."""
        order = {self._siblings: 0, self._publishing: 2}
        for path in sorted(self.work.iterdir(), key=lambda path: order.get(path, 1)):
            if path.name != "lock":
                remove(path)

    def stop(self, error: BaseException) -> None:
        """Keep the finished files after an error, and add a note to it: where they are and how to continue."""
        if self._publishing.exists() or not self.folder.exists():  # publishing has begun: `recover` finishes it
            error.add_note(f"the next run for {self._target} moves the rest of the model there from {self.work}")
            return
        if not self._has_reusable_files():
            self.discard()
            return
        for path in [*self.folder.glob("*.safetensors"), *self.work.glob("*.partial")]:
            if path.name not in self.finished:
                remove(path)
        if (self.folder / CONFIG).exists():
            error.add_note(
                f"the complete, unverified model is kept in {self.folder}: repeat the command to verify it again, add "
                "--no-verify to accept it, or --restart to write it again"
            )
        else:
            error.add_note(
                f"finished files are kept in {self.work}: repeat the command to continue; to discard them, add "
                "--restart or remove that folder"
            )

    def _has_reusable_files(self) -> bool:
        """True if a later run could use files of this one."""
        known = {"lock", self._journal.name, self._publishing.name, self.folder.name, self._siblings.name}
        cached = [path for path in self.work.iterdir() if path.name not in known and path.suffix != ".partial"]
        return bool(cached) or any((self.folder / file).exists() for file in self.finished)

    def failure(self, error: OSError) -> ConversionError:
        """Return a file system error as a `ConversionError` of one line."""
        if error.errno not in _FULL:
            return ConversionError(f"{self._target} cannot be written: {error}")
        written = sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))
        done = f"{byte_size(written)} of {byte_size(self._total)}"
        return ConversionError(f"{self._target} cannot be written: the disk was full after {done}; free some space")

    def _read_journal(self) -> tuple[dict[str, Any], dict[str, Digests]]:
        """Return the fingerprint and the finished files of the earlier run; empty without a readable journal."""
        try:
            content = json.loads(self._journal.read_bytes())
            return dict(content["identity"]), dict(content["finished"])
        except (FileNotFoundError, ValueError, LookupError, TypeError):  # a power failure can truncate the file
            return {}, {}

    def _write_journal(self) -> None:
        write_json(self._journal, {"identity": self._fingerprint, "finished": self.finished})


def _is_plain(name: Any) -> bool:
    """True for the name of a file in a folder, without a path."""
    return isinstance(name, str) and name not in ("", ".", "..") and Path(name).name == name


@contextmanager
def atomic_output(
    target: Path, fingerprint: Fingerprint, overwrite: bool, restart: bool = False
) -> Iterator[AtomicOutput]:
    """Prepare a folder and move it to `target` when it is complete.

    The block writes into `folder` and calls `publish`; without `publish`, the files are removed. After an error the
    finished files stay for the next run with this fingerprint; `restart` discards them.
    """
    target = Path(os.path.abspath(target))
    output = AtomicOutput(target, fingerprint, overwrite)
    try:
        with parents_of(target), locked(output.work, target):
            output.recover()
            check_target(target, overwrite)
            output.begin(restart)
            try:
                yield output
                output.discard()
            except OSError as error:
                failure = output.failure(error)
                output.stop(failure)
                raise failure from error
            except BaseException as error:
                output.stop(error)
                raise
    except OSError as error:
        raise ConversionError(f"{target} cannot be written: {error}") from error


def check_target(target: Path, overwrite: bool) -> None:
    """Refuse to replace anything but an empty folder and, with `overwrite`, a model."""
    if not os.path.lexists(target):
        return
    is_folder = target.is_dir() and not target.is_symlink()
    names = sorted(set(os.listdir(target)) - _IGNORED) if is_folder else []
    fault = _not_a_model(target, names) if is_folder else "is a file or a link"
    if fault:
        raise ConversionError(f"{target} {fault}: it is not overwritten, choose another place")
    if names and not overwrite:
        raise ConversionError(f"{target} is already there: choose another place, or replace it with --overwrite")
    if not os.access(target, os.W_OK | os.X_OK):
        raise ConversionError(f"{target} cannot be written: make it writable, or choose another place")


def _not_a_model(folder: Path, names: Sequence[str]) -> str | None:
    """Return the reason not to overwrite a folder with this content; None if it contains a model or is empty."""
    folders = [name for name in names if name not in FOLDERS and (folder / name).is_dir()]
    if folders:  # such as checkpoints of a training run, a repository, a home directory
        return f"contains the folder {folders[0]!r}, which is not part of a model"
    if names and CONFIG not in names:
        return f"is not a model directory ({CONFIG} is missing)"
    if names and not any(name.endswith(".safetensors") for name in names):
        return "is not a model directory (it has no safetensors)"
    return None


def check_free(work: Path, target: Path, needed: int) -> None:
    """Raise `ConversionError` if the disk of the working directory has fewer than `needed` bytes free."""
    free = shutil.disk_usage(work).free
    if needed > free:
        raise ConversionError(
            f"{target} needs {byte_size(needed)}, but its disk has {byte_size(free)} free: free some space, or "
            "choose another disk"
        )


def check_apart(sources: Iterable[Path], target: Path) -> None:
    """Refuse a target that equals, contains or lies inside one of the source's paths."""
    resolved = Path(os.path.abspath(target)).resolve()  # `..` as in `atomic_output`
    for source in sources:
        origin = source.resolve()
        if origin == resolved or origin in resolved.parents or resolved in origin.parents:
            raise ConversionError(f"{target} overlaps with the source {source}: write to a folder outside the source")
